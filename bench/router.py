"""Decisions per second and their latency of one router process over many workers.

    python bench/router.py [--workers 1000] [--rate 500] [--seconds 5]

Workers are real gRPC servers without a model, in a process of their own; Redis, coordinator and router are real
processes. The router has the first core to itself; everything else is on the other cores, where the workers give way to
the rest. Latency is seen from a client on the same machine, which asks as gateways do, over one call: it includes gRPC
on both sides.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import redis.asyncio as redis
import uvloop
from ryzanstein.v1 import routing_pb2, routing_pb2_grpc

from bench.reading import Reading, higher, lower, write_readings
from services.common.heap import freeze_started
from services.common.keys import RedisKeys
from services.common.leases import BEAT_S, LEASE_TTL_S
from services.common.rpc import open_channel
from services.common.shared_call import SharedCall
from tests.integration.router.fake_worker import FakeWorker
from tests.integration.router.processes import RedisServer, coordinator_process, router_process, running, until

PREFIX = list(range(1, 65))  # the shared system prompt: 1,024 tokens
LEASES_AT_ONCE = 25
Routes = SharedCall[routing_pb2.RouteFrame, routing_pb2.RouteAnswer]
HOLDERS = 20  # workers that have it cached
# How many sessions take turns: the few are all bound during the warm-up, the many are each new when they come.
KINDS = {"plain": 0, "session and prefix": 200, "new session and prefix": 1 << 30}


async def serve_workers(redis_url: str, n: int) -> None:
    """The fleet; runs until killed."""
    os.nice(10)  # its heartbeats may be late, the decisions that are timed may not
    keys, workers = RedisKeys("default"), [FakeWorker(f"worker-{i}") for i in range(n)]
    for worker in workers:  # as real ones: what pulls would save is worked out for every decision with a prefix
        worker.update(kv_bytes_per_token=20_000, pull_bytes_per_s=1e9)
    for worker in workers[:HOLDERS]:
        worker.store(PREFIX)
    for worker in workers:
        await worker.start(port=0)
    async with redis.from_url(redis_url) as client:
        # A few workers at a time: a fleet does not beat in step, and a thousand keepers would take the machine that is
        # measured.
        while True:
            for first in range(0, n, LEASES_AT_ONCE):
                some = workers[first : first + LEASES_AT_ONCE]
                async with client.pipeline(transaction=False) as pipe:
                    for worker in some:
                        pipe.set(keys.worker(worker.worker_id), worker.lease().to_json(), px=int(LEASE_TTL_S * 1000))
                    pipe.zadd(keys.workers, {worker.worker_id: time.time() for worker in some})
                    await pipe.execute()
                await asyncio.sleep(2 * BEAT_S * len(some) / n)


def request(i: int, sessions: int) -> routing_pb2.RouteRequest:
    """A request of one of that many sessions, with a prompt of its own behind the shared prefix; 0: without both."""
    return routing_pb2.RouteRequest(
        request_id=f"request-{i}",
        prompt_tokens=1500,
        max_tokens=128,
        tenant=f"tenant-{i % 20}",
        session=f"session-{sessions}-{i % sessions}" if sessions else "",
        block_hashes=[*PREFIX, *range(1000 + 100 * i, 1029 + 100 * i)] if sessions else [],
    )


async def paced(route: Callable[[int], Awaitable[object]], rate: float, seconds: float) -> list[float]:
    """Latencies in ms when requests arrive evenly, whatever becomes of the earlier ones."""
    latencies: list[float] = []

    async def one(i: int, due: float) -> None:
        await route(i)
        latencies.append((time.perf_counter() - due) * 1000)

    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for i in range(int(rate * seconds)):
            due = began + i / rate
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            group.create_task(one(i, due))
    return latencies


async def flat_out(route: Callable[[int], Awaitable[object]], seconds: float, clients: int) -> float:
    """Decisions per second with that many clients, each waiting for its answer."""
    done, end = 0, time.perf_counter() + seconds

    async def client(offset: int) -> None:
        nonlocal done
        i = offset
        while time.perf_counter() < end:
            await route(i)
            done, i = done + 1, i + clients

    await asyncio.gather(*(client(1_000_000 + c) for c in range(clients)))
    return done / seconds


@contextlib.contextmanager
def on(cores: set[int]) -> Iterator[None]:
    """This thread, and the processes it starts meanwhile, run on these cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextlib.asynccontextmanager
async def stack(n_workers: int) -> AsyncIterator[tuple[Routes, psutil.Process]]:
    """Everything, up and connected: the call over which to ask, and the router's process."""
    every = os.sched_getaffinity(0)
    first = {min(every)}
    with contextlib.ExitStack() as processes:
        processes.enter_context(on(every - first or every))
        directory = processes.enter_context(tempfile.TemporaryDirectory())
        server = RedisServer(Path(directory))
        server.start()
        processes.callback(server.kill)
        fleet = subprocess.Popen([sys.executable, __file__, "--serve", server.url, "--workers", str(n_workers)])  # noqa: ASYNC220
        processes.callback(fleet.wait)
        processes.callback(fleet.kill)
        coordinator = processes.enter_context(running(coordinator_process(server.url)))
        with on(first):
            router = router_process(server.url, COORDINATOR_ADDRESS=coordinator.address)
        processes.enter_context(running(router))
        async with open_channel(router.address) as channel:
            stub = routing_pb2_grpc.RouterStub(channel)

            async def connected() -> bool:
                workers = (await stub.ListWorkers(routing_pb2.ListWorkersRequest(), wait_for_ready=True)).workers
                print(f"{sum(w.eligible for w in workers)} workers connected", file=sys.stderr)
                return sum(w.eligible for w in workers) == n_workers

            await until(connected, within_s=60, every_s=1)
            routes: Routes = SharedCall(stub.RouteMany)
            yield routes, psutil.Process(router.process.pid)
            await routes.close()


async def measure(options: argparse.Namespace) -> dict[str, object]:
    """All numbers."""
    results: dict[str, object] = {"workers": options.workers, "rate": options.rate}
    async with stack(options.workers) as (routes, process):
        freeze_started()  # a full collection of the client would pass for the router's pause
        for name, sessions in KINDS.items():

            async def route(i: int, sessions: int = sessions) -> object:
                async with asyncio.timeout(10):
                    return await routes.ask(routing_pb2.RouteFrame(route=request(i, sessions)))

            await paced(route, options.rate, 1)
            cpu_before = sum(process.cpu_times()[:2])
            latencies = await paced(route, options.rate, options.seconds)
            cpu_s = sum(process.cpu_times()[:2]) - cpu_before
            cuts = statistics.quantiles(latencies, n=1000)
            results[name] = {
                "p50_ms": round(cuts[499], 2),
                "p99_ms": round(cuts[989], 2),
                "p99.9_ms": round(cuts[998], 2),
                "cpu_ms": round(cpu_s / len(latencies) * 1000, 2),
                "flat_out_per_s": round(await flat_out(route, options.seconds, clients=16)),
            }
    return results


def readings(results: dict[str, Any]) -> list[Reading]:
    """The same as data."""
    found = []
    for kind in KINDS:
        row, name = results[kind], f"router/{results['workers']} workers, {results['rate']:g}/s, {kind}"
        found += [lower(f"{name}/decision {cut}", row[f"{cut}_ms"], "ms") for cut in ("p50", "p99")]
        found.append(lower(f"{name}/CPU per decision", row["cpu_ms"], "ms"))
        found.append(higher(f"{name}/flat out", row["flat_out_per_s"], "decisions/s"))
    return found


def main() -> None:
    """Print a table and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--rate", type=float, default=500, help="paced decisions per second")
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the readings there")
    parser.add_argument("--serve", metavar="REDIS_URL", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        uvloop.run(serve_workers(options.serve, options.workers))
        return
    results = uvloop.run(measure(options))
    print(f"{options.workers} workers, {options.rate:.0f} decisions/s offered")
    print(f"{'requests':22}{'p50 ms':>10}{'p99 ms':>10}{'p99.9 ms':>10}{'CPU ms':>10}{'flat out /s':>14}")
    for name, row in results.items():
        if isinstance(row, dict):
            print(f"{name:22}" + "".join(f"{row[k]:>{w}}" for k, w in zip(row, (10, 10, 10, 10, 14), strict=True)))
    print(json.dumps(results))
    if options.json:
        write_readings(options.json, readings(results))


if __name__ == "__main__":
    main()
