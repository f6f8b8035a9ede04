"""Measures the decisions per second and their latency, for one router process and many workers.

    python -m bench.router [--workers 1000] [--holders 20] [--rate 500] [--seconds 5] [--rounds 3]

Workers are real gRPC servers without a model, in their own process; Redis, coordinator and router are real processes.
The router has the first core to itself; the others share the other cores, the workers with low priority. A client on
the same machine measures latency: it uses one call, as gateways do, and so includes gRPC on both sides. The first row
shows gRPC alone: a service on the router's core that answers without a decision. The share of decisions within 5 ms
comes from the router's metric `ryzanstein_router_decision_seconds`, which includes Redis and coordinator. CPU is the
router's time per decision, paced and flat out: under load, more decisions share a message and the round trips to Redis
and to the coordinator. Flat out, it shows how many decisions a core can make.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import redis.asyncio as redis
import uvloop
from prometheus_client.parser import text_string_to_metric_families
from ryzanstein.v1 import routing_pb2, routing_pb2_grpc

from bench.reading import Reading, higher, lower, write_readings
from services.common.heap import freeze_started
from services.common.keys import RedisKeys
from services.common.leases import BEAT_S, LeaseTable
from services.common.ports import free_port
from services.common.rpc import bind, new_server, open_channel
from services.common.shared_call import Routes, share_routes
from services.common.tls.access import COMPONENTS
from services.common.tls.credentials import Tls
from services.common.tls.issuing import Authority
from services.router.load_tracker import UNACKNOWLEDGED_S
from tests.certificates import DAY, write
from tests.integration.router.fake_worker import FakeWorker
from tests.integration.router.processes import KillableRedis, coordinator_process, router_process, running, until

PREFIX = list(range(1, 65))  # the shared system prompt: 1,024 tokens
LEASES_AT_ONCE = 5
FLAT_OUT_CLIENTS = 128  # fewer clients leave the router idle at times: 16 get half the rate of 128
WARM_UP_RATE = 200.0
SETTLE_S = UNACKNOWLEDGED_S + 0.1  # then the router has forgotten the requests, which no worker acknowledges
FLAT_OUT_S = 2.0  # at most: if longer, the low-priority workers would miss heartbeats and look dead
REQUESTS_OF_A_ROUND = 10_000_000  # at most
Row = dict[str, float]
AGAIN = (sys.executable, "-m", "bench.router")  # as a module, so that `bench` sets gRPC up before its import
EMPTY = "no decision: an empty service"
SECONDS = "ryzanstein_router_decision_seconds"
# Number of sessions that take turns: a few are all bound during the warm-up; of many, each request's session is new.
KINDS = {"plain": 0, "session and prefix": 200, "new session and prefix": 1 << 30}


async def serve_workers(redis_url: str, n: int, holders: int, tls: Tls | None) -> None:
    """Run the fleet of workers until killed; the first `holders` have PREFIX cached."""
    os.nice(10)  # late heartbeats are fine, late decisions are not
    workers = [FakeWorker(f"worker-{i}") for i in range(n)]
    for worker in workers:  # as real workers, so that decisions with a prefix compute pulls
        worker.update(kv_bytes_per_token=20_000, pull_bytes_per_s=1e9)
    for worker in workers[:holders]:
        worker.store(PREFIX)
    for worker in workers:
        await worker.start(port=0, tls=tls)
    async with redis.from_url(redis_url) as client:
        leases = LeaseTable(client, RedisKeys("default"))
        # A few workers at a time: a real fleet does not renew its leases in step, and a thousand tasks would load the
        # machine under test.
        while True:
            for first in range(0, n, LEASES_AT_ONCE):
                some = workers[first : first + LEASES_AT_ONCE]
                async with client.pipeline(transaction=False) as pipe:
                    for worker in some:
                        await leases.write(worker.lease(), pipe)
                    await pipe.execute()
                await asyncio.sleep(2 * BEAT_S * len(some) / n)


@dataclass(frozen=True)
class Target:
    """A routing service under test."""

    routes: Routes
    process: psutil.Process
    metrics_url: str = ""  # '' if it has no metrics

    async def timed(self) -> tuple[float, float]:
        """The number of decisions within 5 ms, and of all decisions; NaN without metrics."""
        if not self.metrics_url:
            return math.nan, math.nan
        async with httpx.AsyncClient(trust_env=False) as client:
            text = (await client.get(self.metrics_url)).text
        samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
        of = {(s.name, s.labels.get("le")): s.value for s in samples}
        return of[f"{SECONDS}_bucket", "0.005"], of[f"{SECONDS}_count", None]


class EmptyService(routing_pb2_grpc.RouterServicer):
    """A service that answers every request with the same worker."""

    async def RouteMany(self, messages, context):  # type: ignore[no-untyped-def]  # noqa: N802, D102
        placed = routing_pb2.RouteResponse(worker_id="worker-1", incarnation="0" * 32, address="127.0.0.1:1")
        async for message in messages:
            answers = [routing_pb2.RouteAnswer(tag=frame.tag, placed=placed) for frame in message.frames]
            yield routing_pb2.RouteAnswers(answers=answers)


async def serve_nothing(port: int, tls: Tls | None) -> None:
    """Run the empty service until killed."""
    server = new_server(tls=tls)
    routing_pb2_grpc.add_RouterServicer_to_server(EmptyService(), server)
    bind(server, "127.0.0.1", port, tls)
    await server.start()
    freeze_started()
    await asyncio.Event().wait()


def request(i: int, sessions: int) -> routing_pb2.RouteRequest:
    """A request of one of `sessions` sessions, with its own prompt after the shared prefix; 0: without both."""
    return routing_pb2.RouteRequest(
        request_id=f"request-{i}",
        prompt_tokens=1500,
        max_tokens=128,
        tenant=f"tenant-{i % 20}",
        session=f"session-{sessions}-{i % sessions}" if sessions else "",
        block_hashes=[*PREFIX, *range(1000 + 100 * i, 1029 + 100 * i)] if sessions else [],
    )


@contextlib.contextmanager
def ticking(every_s: float) -> Iterator[asyncio.Event]:
    """An event that a kernel timer sets: timers of the event loop have a resolution of a millisecond."""
    tick, loop = asyncio.Event(), asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGALRM, tick.set)
    signal.setitimer(signal.ITIMER_REAL, every_s, every_s)
    try:
        yield tick
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        loop.remove_signal_handler(signal.SIGALRM)


async def paced(route: Callable[[int], Awaitable[object]], rate: float, seconds: float, first: int = 0) -> list[float]:
    """Latencies in ms of requests that are sent at even intervals, without waiting for earlier ones."""
    latencies: list[float] = []

    async def one(i: int, due: float) -> None:
        await route(first + i)
        latencies.append((time.perf_counter() - due) * 1000)

    async with asyncio.TaskGroup() as group:
        with ticking(1 / rate) as tick:
            began = time.perf_counter()
            for i in range(int(rate * seconds)):
                due = began + i / rate
                while time.perf_counter() < due:
                    tick.clear()
                    await tick.wait()
                group.create_task(one(i, due))
    return latencies


async def flat_out(route: Callable[[int], Awaitable[object]], seconds: float, clients: int, first: int) -> float:
    """Decisions per second with that many clients, each of which waits for its answer."""
    done, end = 0, time.perf_counter() + seconds

    async def client(offset: int) -> None:
        nonlocal done
        i = offset
        while time.perf_counter() < end:
            await route(i)
            done, i = done + 1, i + clients

    await asyncio.gather(*(client(first + c) for c in range(clients)))
    return done / seconds


@contextlib.asynccontextmanager
async def certificates(wanted: bool) -> AsyncIterator[Path | None]:
    """A folder with a folder for each component, or None."""
    if not wanted:
        yield None
        return
    with tempfile.TemporaryDirectory() as folder:
        authority = Authority.new(DAY)
        for component in COMPONENTS:
            write(Path(folder) / component, component, authority)
        yield Path(folder)


def variables(tls: Path | None, component: str) -> dict[str, str]:
    """The settings by which a process shows its certificate."""
    return {"TLS_FOLDER": str(tls / component)} if tls else {}


def shown(tls: Path | None, component: str) -> list[str]:
    """The same as options of this program."""
    return ["--certificate", str(tls / component)] if tls else []


def as_gateway(tls: Path | None) -> Tls | None:
    """TLS of the requests, which come from a gateway."""
    return Tls(tls / "gateway") if tls else None


@contextlib.contextmanager
def on(cores: set[int]) -> Iterator[None]:
    """Pin this thread, and processes that it starts, to these cores while the block runs."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextlib.asynccontextmanager
async def stack(n_workers: int, holders: int, tls: Path | None) -> AsyncIterator[Target]:
    """Start Redis, workers, coordinator and router; yield the router once all workers are connected."""
    every = os.sched_getaffinity(0)
    first = {min(every)}
    with contextlib.ExitStack() as processes:
        processes.enter_context(on(every - first or every))
        directory = processes.enter_context(tempfile.TemporaryDirectory())
        server = KillableRedis(Path(directory))
        server.start()
        processes.callback(server.kill)
        sizes = ["--workers", str(n_workers), "--holders", str(holders)]
        serve = ["--serve", server.url, *sizes, *shown(tls, "worker")]
        fleet = subprocess.Popen([*AGAIN, *serve])  # noqa: ASYNC220
        processes.callback(fleet.wait)
        processes.callback(fleet.kill)
        coordinator = processes.enter_context(
            running(coordinator_process(server.url, forked=False, **variables(tls, "coordinator")))
        )
        port = free_port()
        with on(first):
            settings = {"COORDINATOR_ADDRESS": coordinator.address, "METRICS_PORT": str(port)}
            router = router_process(server.url, forked=False, **settings, **variables(tls, "router"))
        processes.enter_context(running(router))
        async with open_channel(router.address, to="router", tls=as_gateway(tls)) as channel:
            stub = routing_pb2_grpc.RouterStub(channel)

            async def connected() -> bool:
                workers = (await stub.ListWorkers(routing_pb2.ListWorkersRequest(), wait_for_ready=True)).workers
                print(f"{sum(w.eligible for w in workers)} workers connected", file=sys.stderr)
                return sum(w.eligible for w in workers) == n_workers

            await until(connected, within_s=60, every_s=1)
            routes = share_routes(stub)
            yield Target(routes, psutil.Process(router.process.pid), f"http://127.0.0.1:{port}/metrics")
            await routes.close()


@contextlib.asynccontextmanager
async def empty_service(tls: Path | None) -> AsyncIterator[Target]:
    """Start the empty service on the router's core."""
    port = free_port()
    with on({min(os.sched_getaffinity(0))}):
        process = subprocess.Popen([*AGAIN, "--empty", str(port), *shown(tls, "router")])  # noqa: ASYNC220
    try:
        async with open_channel(f"127.0.0.1:{port}", to="router", tls=as_gateway(tls)) as channel:
            await asyncio.wait_for(channel.channel_ready(), 30)
            routes = share_routes(routing_pb2_grpc.RouterStub(channel))
            yield Target(routes, psutil.Process(process.pid))
            await routes.close()
    finally:
        process.kill()
        process.wait()


async def measure_once(target: Target, sessions: int, options: argparse.Namespace, first: int = 0) -> Row:
    """Measure one kind of request once. The requests are numbered from `first`."""

    async def route(i: int) -> object:
        return await target.routes.ask(routing_pb2.RouteFrame(route=request(i, sessions)), 10)

    await paced(route, options.rate or WARM_UP_RATE, min(1, options.seconds), first)
    cpu_before = sum(target.process.cpu_times()[:2])
    flat_out_s = min(FLAT_OUT_S, options.seconds)
    rate = await flat_out(route, flat_out_s, FLAT_OUT_CLIENTS, first + 1_000_000)
    flat_out_cpu_s = sum(target.process.cpu_times()[:2]) - cpu_before
    await asyncio.sleep(SETTLE_S)
    quick_before, timed_before = await target.timed()
    cpu_before = sum(target.process.cpu_times()[:2])
    latencies = await paced(route, options.rate or rate / 2, options.seconds, first + 500_000)
    cpu_s = sum(target.process.cpu_times()[:2]) - cpu_before
    quick, timed = await target.timed()
    cuts = statistics.quantiles(latencies, n=1000)
    return {
        "p50_ms": cuts[499],
        "p99_ms": cuts[989],
        "p99.9_ms": cuts[998],
        "within_5_ms": (quick - quick_before) / (timed - timed_before) * 100,
        "cpu_ms": cpu_s / len(latencies) * 1000,
        "flat_out_cpu_ms": flat_out_cpu_s / (rate * flat_out_s) * 1000,
        "flat_out_per_s": rate,
    }


async def measure(options: argparse.Namespace) -> dict[str, Row]:
    """Measure all kinds in turn in each round; return medians over the rounds."""
    rows: dict[str, list[Row]] = {kind: [] for kind in (EMPTY, *KINDS)}
    async with (
        certificates(options.tls) as tls,
        stack(options.workers, options.holders, tls) as router,
        empty_service(tls) as empty,
    ):
        freeze_started()  # otherwise a garbage collection of the client would count as the router's latency
        for i in range(options.rounds):
            rows[EMPTY].append(await measure_once(empty, 0, options))
            for kind, sessions in KINDS.items():  # new sessions are new in each round
                rows[kind].append(await measure_once(router, sessions, options, i * REQUESTS_OF_A_ROUND))
    return {
        kind: {name: statistics.median(row[name] for row in some) for name in some[0]} for kind, some in rows.items()
    }


def offered(options: argparse.Namespace) -> str:
    """The rate of paced requests."""
    return f"{options.rate:g}/s" if options.rate else "half of flat out"


def readings(rows: dict[str, Row], options: argparse.Namespace) -> list[Reading]:
    """The results as readings."""
    measured = []
    for kind, row in rows.items():
        name = f"router/{options.workers} workers, {offered(options)}, {kind}{', TLS' if options.tls else ''}"
        measured += [lower(f"{name}/decision {cut}", round(row[f"{cut}_ms"], 2), "ms") for cut in ("p50", "p99")]
        measured.append(lower(f"{name}/CPU per decision", round(row["cpu_ms"], 2), "ms"))
        measured.append(lower(f"{name}/CPU per decision, flat out", round(row["flat_out_cpu_ms"], 3), "ms"))
        measured.append(higher(f"{name}/flat out", round(row["flat_out_per_s"]), "decisions/s"))
    return measured


def main() -> None:
    """Parse the options, measure, and show the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--holders", type=int, default=20, help="workers that have the shared prefix cached")
    parser.add_argument("--rate", type=float, default=500, help="paced decisions per second; 0: half of flat out")
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--rounds", type=int, default=1, help="how often each kind of request is measured")
    parser.add_argument("--tls", action="store_true", help="mutual TLS between all processes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the readings there")
    parser.add_argument("--serve", metavar="REDIS_URL", help=argparse.SUPPRESS)
    parser.add_argument("--empty", type=int, metavar="PORT", help=argparse.SUPPRESS)
    parser.add_argument("--certificate", type=Path, metavar="FOLDER", help=argparse.SUPPRESS)
    options = parser.parse_args()
    tls = Tls(options.certificate) if options.certificate else None
    if options.serve:
        uvloop.run(serve_workers(options.serve, options.workers, options.holders, tls))
    elif options.empty:
        uvloop.run(serve_nothing(options.empty, tls))
    else:
        show(uvloop.run(measure(options)), options)


def show(rows: dict[str, Row], options: argparse.Namespace) -> None:
    """Print the table; write the readings with `--json`."""
    print(f"{options.workers} workers, decisions offered: {offered(options)}, median of {options.rounds}")
    print(
        f"{'requests':32}{'p50 ms':>10}{'p99 ms':>10}{'p99.9 ms':>10}{'% in 5 ms':>10}{'CPU ms':>10}"
        f"{'flat out ms':>12}{'flat out /s':>12}"
    )
    for kind, row in rows.items():
        *times, flat_out_ms, rate = row.values()
        print(f"{kind:32}" + "".join(f"{value:>10.2f}" for value in times) + f"{flat_out_ms:>12.3f}{rate:>12.0f}")
    if options.json:
        write_readings(options.json, readings(rows, options))


if __name__ == "__main__":
    main()
