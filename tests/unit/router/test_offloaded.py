"""A prefix below a worker's device costs its load, not its computing."""

from __future__ import annotations

import numpy as np
import pytest
from ryzanstein.v1 import kv_pb2, worker_pb2

from services.router.estimates import estimate
from services.router.held import HeldPrefixes
from services.router.offloaded import offloaded_prefix
from services.router.snapshot import OffloadedPrefix, Query
from tests.unit.router.fleets import Lab, LabWorker, snapshot_of

KV_BYTES = 40_000  # a token's
TOKEN_MS = np.array([0.5, 0.5])


def offloaded(depths: list[kv_pb2.WorkerDepth], host: float = 0.0, disk: float = 0.0) -> OffloadedPrefix | None:
    """Of two workers; the first has places with these speeds in bytes per second, and one of a newer version."""
    speeds = {worker_pb2.KV_PLACE_HOST: host, worker_pb2.KV_PLACE_DISK: disk, 9: 1e12}
    places = [worker_pb2.KvPlaceState(place=place, load_bytes_per_s=speed) for place, speed in speeds.items() if speed]  # type: ignore[arg-type]
    lab = Lab()
    lab.join("w0", incarnation="i", kv_bytes_per_token=KV_BYTES, kv_places=places)
    lab.join("w1", incarnation="i")
    return offloaded_prefix(lab.pool.members, HeldPrefixes.by_worker(depths).depths(lab.pool), TOKEN_MS)


def depth(blocks: int, host: int = 0, disk: int = 0, incarnation: str = "i") -> kv_pb2.WorkerDepth:
    return kv_pb2.WorkerDepth(
        worker_id="w0", incarnation=incarnation, blocks=blocks, host_blocks=host, disk_blocks=disk
    )


def test_each_place_adds_the_blocks_missing_in_faster_places() -> None:
    prefix = offloaded([depth(10, 20, 50)], host=4e9, disk=4e8)
    assert prefix is not None
    assert prefix.tokens.tolist() == [40 * 16, 0]
    assert prefix.load_ms[0] == pytest.approx(10 * 16 * KV_BYTES / 4e6 + 30 * 16 * KV_BYTES / 4e5)


@pytest.mark.parametrize(
    ("depths", "speeds"),
    [
        ([depth(10)], {"disk": 1e9}),
        ([depth(10, disk=10)], {"disk": 1e9}),  # the device holds them
        ([depth(0, disk=10)], {"host": 1e9}),  # the worker no longer has the place
        ([depth(0, disk=10)], {"disk": 7e7}),  # computing is faster
        ([depth(0, disk=10, incarnation="earlier")], {"disk": 1e9}),
        ([kv_pb2.WorkerDepth(worker_id="unknown", incarnation="i", disk_blocks=9)], {"disk": 1e9}),
    ],
)
def test_blocks_that_would_not_be_loaded_do_not_count(
    depths: list[kv_pb2.WorkerDepth], speeds: dict[str, float]
) -> None:
    assert offloaded(depths, **speeds) is None


def test_estimate_charges_the_load_instead_of_the_tokens() -> None:
    snapshot = snapshot_of([LabWorker(rate=2000.0, step_ms=20.0), LabWorker(rate=2000.0, step_ms=20.0)])
    matched = np.array([100.0, 100.0])
    prefix = OffloadedPrefix(np.array([800.0, 0.0]), np.array([50.0, 0.0]))
    computed = estimate(snapshot, Query(1000, matched_tokens=matched)).ttft_ms
    loaded = estimate(snapshot, Query(1000, matched_tokens=matched, offloaded=prefix)).ttft_ms
    assert computed[0] - loaded[0] == pytest.approx(800 / 2 - 50)
    assert computed[1] == loaded[1]


def test_whole_prompt_below_the_device_leaves_a_token_to_compute() -> None:
    snapshot = snapshot_of([LabWorker(rate=2000.0, step_ms=20.0)])
    prefix = OffloadedPrefix(np.array([1000.0]), np.array([50.0]))
    estimates = estimate(snapshot, Query(1000, matched_tokens=np.zeros(1), offloaded=prefix))
    assert estimates.ttft_ms[0] == pytest.approx(0.5 + 50)
