"""How long one client can hold up the streams of all others: 100 paced streams beside the worst input that may be sent.

    python -m bench.stall [--seconds 5] [--only text]

Each kind of input is sent in a loop by a process of its own, over one connection, while the streams get a token every
20 ms. The gateway has a core to itself; the scripted worker, the streams and the attacker share the others. A gap is
the time between two arrivals on one stream; `/livez` is asked every 20 ms beside it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx
import uvloop

from bench.gateway import OURS, running, wait_ready
from bench.gateway_clients import HttpTarget
from bench.reading import Reading, lower, write_readings
from bench.stall_inputs import INPUTS, PACE_US
from bench.stats import percentile
from services.common.ports import free_port

STREAMS = 100
QUIET = "nothing"


@dataclass(frozen=True)
class Row:
    """Streams beside one kind of input; milliseconds."""

    sent: str
    answers: dict[str, int]  # of the attacker, by status
    gap_p50: float
    gap_p999: float
    gap_max: float
    livez_max: float


class Attacker:
    """Sends one input again and again, in a process of its own."""

    def __init__(self, kind: str, rest: int, grpc_port: int) -> None:
        command = [sys.executable, "-m", "bench.stall_inputs", kind, str(rest), str(grpc_port)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def stop(self) -> dict[str, int]:
        """End it; what it was answered, by status."""
        self._process.kill()  # gRPC would turn a gentler signal into a status
        answered, _ = self._process.communicate()
        counts: dict[str, int] = {}
        for status in answered.split():
            counts[status] = counts.get(status, 0) + 1
        return counts

    def kill(self) -> None:
        """End it, if that has not been done."""
        self._process.kill()
        self._process.wait()


@contextlib.contextmanager
def attacking(kind: str, rest: int, grpc_port: int) -> Iterator[Attacker | None]:
    """An attacker while the block runs."""
    if kind == QUIET:
        yield None
        return
    attacker = Attacker(kind, rest, grpc_port)
    try:
        yield attacker
    finally:
        attacker.kill()


async def watch_livez(port: int, until: float) -> float:
    """The longest that `/livez` took, in milliseconds."""
    longest = 0.0
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=120) as client:
        while (asked := time.perf_counter()) < until:
            await client.get("/livez")
            longest = max(longest, (time.perf_counter() - asked) * 1000)
            await asyncio.sleep(0.02)
    return longest


async def stream(target: HttpTarget, until: float) -> list[float]:
    """One answer after the other; the gaps within them, in milliseconds."""
    gaps: list[float] = []
    while time.perf_counter() < until:
        arrivals = await target.ask(PACE_US, stream=True)
        gaps += [(later - earlier) * 1000 for earlier, later in itertools.pairwise(arrivals)]
    return gaps


async def beside(kind: str, rest: int, grpc_port: int, seconds: float) -> Row:
    """Streams beside one kind of input."""
    target = HttpTarget(OURS, rest)
    with attacking(kind, rest, grpc_port) as attacker:
        until = time.perf_counter() + seconds
        streams = asyncio.gather(*(stream(target, until) for _ in range(STREAMS)))
        livez = await watch_livez(rest, until)
        gaps = list(itertools.chain.from_iterable(await streams))
        answers = attacker.stop() if attacker is not None else {}
    await target.close()
    return Row(kind, answers, percentile(gaps, 50), percentile(gaps, 99.9), max(gaps), livez)


async def measure(options: argparse.Namespace, folder: Path, processes: contextlib.ExitStack) -> list[Row]:
    """Start everything, then send every kind once."""
    every = os.sched_getaffinity(0)
    gateway_cores = {min(every)}
    others = every - gateway_cores or every
    os.sched_setaffinity(0, others)
    mocks = processes.enter_context(
        running([sys.executable, "-m", "bench.gateway_mocks"], folder / "mocks.log", others)
    )
    assert mocks.stdout is not None
    addresses = json.loads(mocks.stdout.readline())
    rest, grpc_port, log = free_port(), free_port(), folder / "gateway.log"
    env = {
        "RYZANSTEIN_GATEWAY_PORT": str(rest),
        "RYZANSTEIN_GRPC_PORT": str(grpc_port),
        "RYZANSTEIN_HOST": "127.0.0.1",
        "RYZANSTEIN_ROUTER_ADDRESSES": addresses["router"],
        "RYZANSTEIN_METRICS_PORT": str(free_port()),
    }
    gateway = processes.enter_context(running([sys.executable, "-m", "services.gateway"], log, gateway_cores, env))
    wait_ready(f"http://127.0.0.1:{rest}/readyz", gateway, log)
    await HttpTarget(OURS, rest).ask(0, stream=False)
    kinds = [kind for kind in (QUIET, *INPUTS) if not options.only or kind in options.only]
    rows = []
    for kind in kinds:
        rows.append(await beside(kind, rest, grpc_port, options.seconds))
        print(line(rows[-1]), flush=True)
    return rows


def line(row: Row) -> str:
    """A row of the table."""
    answers = ", ".join(f"{count} × {status}" for status, count in row.answers.items()) or "none"
    numbers = (row.gap_p50, row.gap_p999, row.gap_max, row.livez_max)
    return f"| {row.sent} | {answers} | {' | '.join(f'{number:,.0f}' for number in numbers)} |"


def readings(rows: list[Row]) -> list[Reading]:
    """What the other clients notice, as data."""
    found = []
    for row in rows:
        name = f"stall/beside {row.sent}"
        found += [lower(f"{name}/gap p99.9", row.gap_p999, "ms"), lower(f"{name}/gap max", row.gap_max, "ms")]
    return found


def main() -> None:
    """Print the table and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0, help="for each kind of input")
    parser.add_argument("--only", action="append", default=[], choices=[QUIET, *INPUTS])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the readings there")
    options = parser.parse_args()
    print("| sent in a loop | answers | gap p50 ms | p99.9 | largest | /livez largest |\n|---|---|---|---|---|---|")
    with contextlib.ExitStack() as processes, tempfile.TemporaryDirectory() as folder:
        rows = uvloop.run(measure(options, Path(folder), processes))
    print(json.dumps([asdict(row) for row in rows]))
    if options.json:
        write_readings(options.json, readings(rows))


if __name__ == "__main__":
    main()
