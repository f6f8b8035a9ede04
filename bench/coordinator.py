"""Measures the KV-cache coordinator: delay of events, time of a look-up, memory per entry.

    python -m bench.coordinator [--workers 1000] [--blocks 10000] [--events 1000]

`--blocks` is per worker; 1,000 x 100,000 needs 9 GB and two minutes. Half of the look-ups match a prompt of one worker,
half match a system prompt that all workers hold.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil
import uvloop
from ryzanstein.v1 import kv_pb2

from bench.reading import Reading, lower, write_readings
from services.common.leases import Lease
from services.kv_coordinator.hot import HotPrefixes, Pins
from services.kv_coordinator.index import BlockIndex, Slot
from services.kv_coordinator.metrics import CoordinatorMetrics
from services.kv_coordinator.service import CoordinatorService
from services.kv_coordinator.subscriptions import Subscriptions, SyncCounters
from tests.integration.router.fake_worker import FakeWorker

SYSTEM_PROMPT = 128  # blocks that every worker holds: 2,048 tokens
CHAIN = 1000  # blocks of one prompt: 16,000 tokens
EVENT_PAUSE_S = 0.002


def quantiles(values: list[float], digits: int) -> dict[str, float]:
    """Median and 99th percentile."""
    cuts = statistics.quantiles(values, n=100)
    return {"p50": round(cuts[49], digits), "p99": round(cuts[98], digits)}


class TimedIndex(BlockIndex):
    """An index whose hashes are send times. It records the age of each hash when it becomes visible."""

    def __init__(self) -> None:
        super().__init__()
        self.ages_ms: list[float] = []

    def store(self, slot: Slot, hashes: Iterable[int]) -> None:
        """Store the hashes, then record their ages."""
        super().store(slot, hashes)
        self.ages_ms += [(time.monotonic_ns() - sent) / 1e6 for sent in hashes]


async def send_events(n: int) -> None:
    """Run a worker that sends events, in its own process; print its address."""
    worker = FakeWorker("sender")
    await worker.start()
    print(worker.address, flush=True)
    while not worker.syncs:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    for _ in range(n):
        await asyncio.sleep(EVENT_PAUSE_S)
        worker.store([time.monotonic_ns()])
    await asyncio.sleep(60)


async def event_to_visible(n: int) -> dict[str, float]:
    """Milliseconds from the worker's event to the coordinator's index, over gRPC between two processes."""
    command = [sys.executable, "-m", "bench.coordinator", "--send", "--events", str(n)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as sender:  # noqa: ASYNC220
        assert sender.stdout is not None
        address = sender.stdout.readline().strip()
        index = TimedIndex()
        subscriptions = Subscriptions(index, SyncCounters())
        subscription = asyncio.create_task(subscriptions.follow(Lease("sender", "", address, "tiny", "serving")))
        async with asyncio.timeout(60 + n * EVENT_PAUSE_S * 2):
            while len(index.ages_ms) < n:  # noqa: ASYNC110  # the index has no event to wait for
                await asyncio.sleep(0.05)
        subscription.cancel()
        sender.kill()
    return quantiles(index.ages_ms, 3)


def fill(n_workers: int, n_blocks: int) -> tuple[BlockIndex, list[list[int]]]:
    """An index of that size, and one chain per worker, whose beginning the worker holds."""
    source, index = random.Random(1), BlockIndex()
    system = [source.getrandbits(64) for _ in range(SYSTEM_PROMPT)]
    chains = []
    for i in range(n_workers):
        slot = index.open_slot(f"ryzanstein-worker-{i}", f"{source.getrandbits(128):032x}")
        index.store(slot, system)
        chain = [source.getrandbits(64) for _ in range(min(CHAIN, n_blocks) - SYSTEM_PROMPT)]
        index.store(slot, chain[: source.randrange(len(chain))])
        chains.append(system + chain)
        while slot.blocks < n_blocks:
            index.store(slot, [source.getrandbits(64) for _ in range(min(10_000, n_blocks - slot.blocks))])
    return index, chains


def lookups(index: BlockIndex, chains: list[list[int]], n: int) -> dict[str, dict[str, float]]:
    """The service's time per look-up, with protobuf coding, without the network."""
    from prometheus_client import CollectorRegistry

    counters, metrics = SyncCounters(), CoordinatorMetrics(CollectorRegistry(), SyncCounters())
    service = CoordinatorService(index, Subscriptions(index, counters), counters, HotPrefixes(1024), Pins(1), metrics)
    results = {}
    for name, tail in (("all workers have the system prompt", True), ("one worker has the prompt", False)):
        times = []
        for i in range(n):
            chain = chains[i % len(chains)][0 if tail else SYSTEM_PROMPT :]
            request = kv_pb2.LookupRequest(hashes=chain, roster=index.version).SerializeToString()
            # The thread's CPU time, which excludes other processes of the machine.
            began = time.thread_time()
            response = service.lookup(kv_pb2.LookupRequest.FromString(request))
            response.SerializeToString()
            times.append((time.thread_time() - began) * 1000)
        results[name] = quantiles(times, 3)
    return results


def readings(results: dict[str, Any]) -> list[Reading]:
    """The results as readings."""
    name = f"coordinator/{results['workers']} workers x {results['blocks_per_worker']} blocks"
    measured = [
        lower(f"{name}/memory per entry", results["bytes_per_entry"], "bytes"),
        lower(f"{name}/store a block", results["store_us_per_block"], "us"),
        lower(f"{name}/longest sweep slice", results["longest_sweep_slice_ms"], "ms"),
    ]
    timed = {"event to visible": results["event_to_visible_ms"]}
    timed |= {f"lookup, {what}": times for what, times in results["lookup_ms"].items()}
    return measured + [
        lower(f"{name}/{what} {cut}", value, "ms") for what, row in timed.items() for cut, value in row.items()
    ]


def main() -> None:
    """Run the benchmark; print a table and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--blocks", type=int, default=10_000, help="per worker")
    parser.add_argument("--events", type=int, default=1000)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the readings there")
    parser.add_argument("--send", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.send:
        uvloop.run(send_events(options.events))
        return
    visible = uvloop.run(event_to_visible(options.events))
    process = psutil.Process()
    gc.collect()
    before, began = process.memory_info().rss, time.process_time()
    index, chains = fill(options.workers, options.blocks)
    filled_s = time.process_time() - began
    bytes_per_entry = (process.memory_info().rss - before) / index.entries
    times = lookups(index, chains, 1000)
    slices: list[float] = []
    index.close_slot(next(index.members(1)))
    sweep, last = index.sweep(0.001), time.thread_time()
    for _ in sweep:
        slices.append((time.thread_time() - last) * 1000)
        last = time.thread_time()
    results = {
        "workers": options.workers,
        "blocks_per_worker": options.blocks,
        "entries": index.entries,
        "bytes_per_entry": round(bytes_per_entry, 1),
        "store_us_per_block": round(filled_s / index.entries * 1e6, 2),
        "event_to_visible_ms": visible,
        "lookup_ms": times,
        "longest_sweep_slice_ms": round(max(slices, default=0.0), 2),
    }
    print(f"{options.workers} workers x {options.blocks} blocks: {index.entries} entries")
    print(f"{'memory per entry':40}{results['bytes_per_entry']:>10} bytes")
    print(f"{'store, with making up a hash':40}{results['store_us_per_block']:>10} us/block")
    print(f"{'longest slice of a sweep':40}{results['longest_sweep_slice_ms']:>10} ms")
    for name, row in {"event to visible": visible, **{f"lookup: {n}": t for n, t in times.items()}}.items():
        print(f"{name:40}{row['p50']:>10} ms p50{row['p99']:>10} ms p99")
    print(json.dumps(results))
    if options.json:
        write_readings(options.json, readings(results))


if __name__ == "__main__":
    main()
