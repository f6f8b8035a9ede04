"""Measures the gateway's overhead: against the worker's gRPC, against other proxies, and gRPC against REST.

    python -m bench.gateway [--peer litellm=/path/to/venv --peer vllm-router=/path/to/venv]

Scripted mocks answer with 64 tokens, so that only the proxy takes time. Each proxy runs alone on core 0, the mocks and
the client on the other cores; targets take turns within each round, and the median round counts.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import uvloop

from bench.gateway_clients import (
    ConnectTarget,
    GrpcTarget,
    HttpTarget,
    Relay,
    Target,
    bytes_per_request,
    streamed_text,
)
from bench.gateway_mocks import ANSWER_TOKENS, MODEL, answer_text
from bench.reading import Reading, higher, lower, write_readings
from bench.stats import median, percentile
from services.common.ports import free_port
from services.common.tls.access import COMPONENTS
from services.common.tls.issuing import Authority
from tests.certificates import DAY, write

AT_ONCE, UNPACED = 0, 1
WIRE_PACE_US = 8_000  # slow enough that every token is a message of its own
DIRECT, OURS, BACKEND = "worker, no gateway", "ryzanstein gateway", "mock backend, no proxy"
OURS_TLS = "ryzanstein gateway, mutual TLS behind it"


@dataclass(frozen=True)
class Ran:
    """The result of one closed loop; latencies in milliseconds."""

    p50: float
    p99: float
    per_s: float


@dataclass(frozen=True)
class Row:
    """The results of one target: whole answers, 1 and 32 at a time; streams, 64 at a time."""

    alone: Ran
    busy: Ran
    tokens_per_s: float


async def loop(target: Target, requests: int, clients: int, pace_us: int, *, stream: bool) -> Ran:
    """Run a closed loop of that many clients: each waits for its answer before its next request."""
    latencies: list[float] = []
    left = iter(range(requests))

    async def client() -> None:
        for _ in left:
            asked_at = time.perf_counter()
            await target.ask(pace_us, stream=stream)
            latencies.append((time.perf_counter() - asked_at) * 1000)

    began = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    return Ran(percentile(latencies, 50), percentile(latencies, 99), requests / (time.perf_counter() - began))


def middle(runs: list[Ran]) -> Ran:
    """The median of each field."""
    return Ran(median([r.p50 for r in runs]), median([r.p99 for r in runs]), median([r.per_s for r in runs]))


def turns(targets: list[Target], round_number: int) -> list[Target]:
    """Rotate the targets, so that another one goes first in every round."""
    cut = round_number % len(targets)
    return targets[cut:] + targets[:cut]


async def overhead(targets: list[Target], rounds: int, share: float) -> dict[str, Row]:
    """Measure every target under the same loads; `share` of their requests is sent."""
    runs: dict[tuple[str, str], list[Ran]] = {}
    loads = (("alone", 200, 1, AT_ONCE, False), ("busy", 640, 32, AT_ONCE, False), ("streams", 128, 64, UNPACED, True))
    for target in targets:
        await loop(target, 64, 32, AT_ONCE, stream=False)
    for number in range(rounds):
        for name, requests, clients, pace_us, stream in loads:
            for target in turns(targets, number):
                ran = await loop(target, math.ceil(share * requests), clients, pace_us, stream=stream)
                runs.setdefault((target.name, name), []).append(ran)
    figures = {key: middle(several) for key, several in runs.items()}
    return {
        t.name: Row(figures[t.name, "alone"], figures[t.name, "busy"], figures[t.name, "streams"].per_s * ANSWER_TOKENS)
        for t in targets
    }


async def hold_streams(port: int, streams: int, pace_ms: int) -> dict[str, float]:
    """Run all streams at once. A gap lies between two arrivals of a stream; a missing token makes an error."""
    target = HttpTarget(OURS, port, answers=[])
    began = time.perf_counter()
    asking = (target.ask(pace_ms * 1000, stream=True) for _ in range(streams))
    ended = await asyncio.gather(*asking, return_exceptions=True)
    seconds = time.perf_counter() - began
    await target.close()
    expected = answer_text()
    whole = sum(streamed_text(answer) == expected for answer in target.answers or ())
    arrived = [answer for answer in ended if isinstance(answer, list)]
    gaps = [(later - earlier) * 1000 for times in arrived for earlier, later in itertools.pairwise(times)]
    return {
        "streams": streams,
        "pace_ms": pace_ms,
        "errors": streams - whole,
        "tokens_per_s": whole * ANSWER_TOKENS / seconds,
        "gap_p50_ms": percentile(gaps, 50),
        "gap_p99_ms": percentile(gaps, 99),
        "gap_max_ms": max(gaps),
    }


async def grpc_against_rest(rest_port: int, grpc_port: int, rounds: int, share: float) -> dict[str, dict[str, object]]:
    """Measure the latency of whole answers, and bytes on the wire."""
    targets: list[Target] = [HttpTarget("REST", rest_port), GrpcTarget("gRPC", f"127.0.0.1:{grpc_port}")]
    runs: dict[tuple[str, int], list[Ran]] = {}
    for target in targets:
        await loop(target, 64, 32, AT_ONCE, stream=False)
    for number in range(rounds):
        for clients, requests in ((1, 200), (32, 640)):
            for target in turns(targets, number):
                ran = await loop(target, math.ceil(share * requests), clients, AT_ONCE, stream=False)
                runs.setdefault((target.name, clients), []).append(ran)
    figures: dict[str, dict[str, object]] = {}
    for target, port in zip(targets, (rest_port, grpc_port), strict=True):
        relay = Relay(port)
        async with await relay.start():
            name, at = target.name, relay.port
            relayed: Target = HttpTarget(name, at) if name == "REST" else GrpcTarget(name, f"127.0.0.1:{at}")
            whole = await bytes_per_request(relayed, relay, pace_us=AT_ONCE, stream=False)
            streamed = await bytes_per_request(relayed, relay, pace_us=WIRE_PACE_US, stream=True)
            await relayed.close()
            await asyncio.sleep(0.1)  # let the relay see the end of its connections
        figures[name] = {
            "alone": asdict(middle(runs[name, 1])),
            "busy": asdict(middle(runs[name, 32])),
            "whole_bytes_up_down": whole,
            "streamed_bytes_up_down": streamed,
        }
        await target.close()
    return figures


@contextlib.contextmanager
def running(
    command: list[str], log: Path, cores: set[int], env: dict[str, str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    """Run a process on these cores while the block runs."""
    with log.open("w") as errors:
        process = subprocess.Popen(
            command,
            env={**os.environ, **(env or {})},
            stdout=subprocess.PIPE if "bench.gateway_mocks" in command else errors,
            stderr=errors,
            text=True,
            preexec_fn=lambda: os.sched_setaffinity(0, cores),
        )
    try:
        yield process
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        process.kill()
        process.wait()


def wait_ready(url: str, process: subprocess.Popen[str], log: Path) -> None:
    """Return once the URL answers 200; raises RuntimeError after two minutes, or if the process ends."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(url, timeout=2, trust_env=False).status_code == httpx.codes.OK:
                return
        time.sleep(0.2)
    raise RuntimeError(f"{url} did not become ready:\n{log.read_text()[-2000:]}")


def peer_command(name: str, home: Path, port: int, backend: int, folder: Path) -> tuple[list[str], str]:
    """The command that starts a peer in front of the mock backend, and the path of its readiness probe."""
    url = f"http://127.0.0.1:{backend}"
    if name == "litellm":
        params = {"model": f"openai/{MODEL}", "api_base": f"{url}/v1", "api_key": "unused"}
        config = folder / "litellm.yaml"  # JSON is YAML
        open_to_all = {"dangerously_permit_weak_or_unset_master_key": True}  # no keys, like the gateway here
        models = [{"model_name": MODEL, "litellm_params": params}]
        config.write_text(json.dumps({"model_list": models, "general_settings": open_to_all}))
        command = [str(home / "bin" / "litellm"), "--config", str(config), "--host", "127.0.0.1", "--port", str(port)]
        return [*command, "--num_workers", "1", "--telemetry", "False"], "/health/liveliness"
    if name == "vllm-router":
        command = [str(home / "bin" / "vllm-router"), "--host", "127.0.0.1", "--port", str(port), "--worker-urls", url]
        metrics = ["--prometheus-port", str(free_port()), "--log-level", "error"]
        return [*command, "--policy", "round_robin", *metrics], "/health"
    raise ValueError(f"unknown peer {name!r}; known: litellm, vllm-router")


@dataclass(frozen=True)
class Ports:
    """Where a gateway listens."""

    rest: int
    grpc: int


def start_gateway(
    folder: Path,
    processes: contextlib.ExitStack,
    cores: set[int],
    mocks_cores: set[int],
    certificates: Path | None = None,
) -> tuple[dict[str, Any], Ports]:
    """Start mocks and a gateway before them; under mutual TLS if there are `certificates`. Logs go to `folder`."""
    command = [sys.executable, "-m", "bench.gateway_mocks"]
    command += ["--certificates", str(certificates)] if certificates else []
    mocks = processes.enter_context(running(command, folder / "mocks.log", mocks_cores))
    assert mocks.stdout is not None
    addresses: dict[str, Any] = json.loads(mocks.stdout.readline())
    ports = Ports(free_port(), free_port())
    env = {
        "RYZANSTEIN_GATEWAY_PORT": str(ports.rest),
        "RYZANSTEIN_GRPC_PORT": str(ports.grpc),
        "RYZANSTEIN_HOST": "127.0.0.1",
        "RYZANSTEIN_ROUTER_ADDRESSES": addresses["router"],
        **({"RYZANSTEIN_TLS_FOLDER": str(certificates / "gateway")} if certificates else {}),
    }
    log = folder / "gateway.log"
    gateway = processes.enter_context(running([sys.executable, "-m", "services.gateway"], log, cores, env))
    wait_ready(f"http://127.0.0.1:{ports.rest}/readyz", gateway, log)
    return addresses, ports


def write_certificates(folder: Path) -> None:
    """One of each component, by its name."""
    authority = Authority.new(DAY)
    for component in COMPONENTS:
        write(folder / component, component, authority)


async def measure(options: argparse.Namespace, folder: Path, processes: contextlib.ExitStack) -> dict[str, Any]:
    """Start all processes, then run every part once."""
    every = os.sched_getaffinity(0)
    proxy_cores = {min(every)}
    os.sched_setaffinity(0, every - proxy_cores or every)
    addresses, ports = start_gateway(folder, processes, proxy_cores, every - proxy_cores or every)
    peers: list[Target] = []
    for name, home in options.peer:
        port, log = free_port(), folder / f"{name}.log"
        command, ready = peer_command(name, Path(home), port, addresses["backend"], folder)
        peer = processes.enter_context(running(command, log, proxy_cores))
        wait_ready(f"http://127.0.0.1:{port}{ready}", peer, log)
        peers.append(HttpTarget(name, port))
    secured = None
    if options.tls:
        certificates = folder / "tls"
        write_certificates(certificates)
        _, secured = start_gateway(certificates, processes, proxy_cores, every - proxy_cores or every, certificates)
    targets: list[Target] = [  # after the last fork, since gRPC starts threads
        ConnectTarget(DIRECT, addresses["worker"]),
        HttpTarget(OURS, ports.rest),
        HttpTarget(BACKEND, addresses["backend"]),
        *peers,
        *([HttpTarget(OURS_TLS, secured.rest)] if secured else []),
    ]
    rows = await overhead(targets, options.rounds, options.share)
    results: dict[str, Any] = {
        "overhead": {name: asdict(row) for name, row in rows.items()},
        "held": await hold_streams(ports.rest, options.streams, options.pace_ms),
        "protocols": await grpc_against_rest(ports.rest, ports.grpc, options.rounds, options.share),
    }
    for target in targets:
        await target.close()
    return results


def show(results: dict[str, Any]) -> str:
    """Format the tables in Markdown."""
    lines = [
        "| 64-token answers | C=1 p50 ms | p99 ms | C=32 p50 ms | p99 ms | req/s | C=64 streams, tokens/s |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in results["overhead"].items():
        a, b = row["alone"], row["busy"]
        numbers = (f"{a['p50']:.2f}", f"{a['p99']:.2f}", f"{b['p50']:.1f}", f"{b['p99']:.1f}", f"{b['per_s']:,.0f}")
        lines.append(f"| {name} | {' | '.join(numbers)} | {row['tokens_per_s']:,.0f} |")
    held = results["held"]
    lines += [
        "",
        f"{held['streams']} streams held, a token every {held['pace_ms']} ms: {held['errors']} errors, "
        f"{held['tokens_per_s']:,.0f} tokens/s, gaps p50 {held['gap_p50_ms']:.0f} ms, p99 {held['gap_p99_ms']:.0f} ms, "
        f"largest {held['gap_max_ms']:.0f} ms",
        "",
        "| gateway | C=1 p50 / p99 ms | C=32 p50 / p99 ms | C=32 req/s | whole answer, bytes up / down "
        "| streamed, bytes up / down |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in results["protocols"].items():
        a, b, w, s = row["alone"], row["busy"], row["whole_bytes_up_down"], row["streamed_bytes_up_down"]
        lines.append(
            f"| {name} | {a['p50']:.2f} / {a['p99']:.2f} | {b['p50']:.1f} / {b['p99']:.1f} | {b['per_s']:,.0f} "
            f"| {w[0]:,.0f} / {w[1]:,.0f} | {s[0]:,.0f} / {s[1]:,.0f} |"
        )
    return "\n".join(lines)


def readings(results: dict[str, Any]) -> list[Reading]:
    """The gateway's results as readings; raises RuntimeError if a held stream lost a token."""
    held, row, figures = results["held"], results["overhead"][OURS], []
    if held["errors"]:
        raise RuntimeError(f"{held['errors']} of {held['streams']} held streams were not whole")
    rows = [("REST", row), ("gRPC", results["protocols"]["gRPC"])]
    if OURS_TLS in results["overhead"]:
        rows.append(("REST, TLS", results["overhead"][OURS_TLS]))
    for protocol, ran in rows:
        for clients, load in (("1 client", ran["alone"]), ("32 clients", ran["busy"])):
            name = f"gateway/{protocol}, {clients}"
            figures += [lower(f"{name}/answer {cut}", load[cut], "ms") for cut in ("p50", "p99")]
            figures.append(higher(f"{name}/answers", load["per_s"], "requests/s"))
    figures.append(higher("gateway/REST, 64 streams/output", row["tokens_per_s"], "tokens/s"))
    streams = f"gateway/{held['streams']} held streams, {held['pace_ms']} ms pace"
    figures += [lower(f"{streams}/gap {cut}", held[f"gap_{cut}_ms"], "ms") for cut in ("p50", "p99", "max")]
    for protocol, ran in results["protocols"].items():
        figures.append(
            lower(f"gateway/{protocol}, streamed/answer on the wire", sum(ran["streamed_bytes_up_down"]), "bytes")
        )
    return figures


def _peer(text: str) -> tuple[str, str]:
    name, separator, home = text.partition("=")
    if not separator:
        raise argparse.ArgumentTypeError(f"{text!r} is not name=home")
    return name, home


def main() -> None:
    """Print the tables and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", type=_peer, action="append", default=[], metavar="NAME=HOME")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--share", type=float, default=1, help="of the requests of a round, 0 to 1")
    parser.add_argument("--tls", action="store_true", help="a second gateway, under mutual TLS, in the same turns")
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--pace-ms", type=int, default=100, help="between the tokens of a held stream")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the readings there")
    options = parser.parse_args()
    with contextlib.ExitStack() as processes, tempfile.TemporaryDirectory() as folder:
        results = uvloop.run(measure(options, Path(folder), processes))
    print(show(results))
    print(json.dumps(results))
    if options.json:
        write_readings(options.json, readings(results))


if __name__ == "__main__":
    main()
