"""How far a model's start is, and what earlier starts say of the rest."""

from __future__ import annotations

import pytest
from ryzanstein.v1 import worker_pb2 as pb

from services.router.breaker import BreakerLimits
from services.router.pool import Pool
from services.router.starts import PAST_STARTS, StartEstimate, StartReport, Starts

LOADING, SERVING, SLEEPING = pb.PHASE_LOADING, pb.PHASE_SERVING, pb.PHASE_SLEEPING


class StartingModel:
    """A model whose workers are moved by hand, and a clock."""

    def __init__(self) -> None:
        self.now = 100.0
        self.starts = Starts(lambda: self.now)
        self.pool = Pool("m", 30.0, lambda: self.now)

    def move(self, phase: pb.Phase, worker_id: str = "w", **state: int) -> None:
        if worker_id not in self.pool.members:
            self.pool.add(worker_id, "here:1", BreakerLimits())
        fields = {"prefill_tokens_per_s": 1000, "decode_step_ms": 10, "heartbeat_ms": 10**6, **state}
        self.pool.update(worker_id, pb.WorkerState(worker_id=worker_id, phase=phase, **fields), "router")

    def passes(self, seconds: float, *, wanted: bool = True) -> StartEstimate | None:
        self.starts.observe(self.pool, wanted=wanted)
        self.now += seconds
        self.starts.observe(self.pool, wanted=wanted)
        return self.starts.estimate(self.pool)

    def run(self, unknown_s: float, loading_s: float) -> None:
        """A whole start, after which the worker leaves."""
        self.passes(unknown_s)
        self.move(LOADING)
        self.passes(loading_s)
        self.move(SERVING)
        assert self.passes(0) is None
        self.pool.remove("w")


def test_estimate_is_the_median_of_earlier_starts_less_the_time_in_the_stage() -> None:
    start = StartingModel()
    assert start.passes(1) == StartEstimate("unknown", None)
    start.starts.observe(start.pool, wanted=False)
    for loading_s in (10, 40, 20):
        start.run(5, loading_s)
    assert start.passes(2) == StartEstimate("unknown", 23)
    start.move(LOADING)
    assert start.passes(8) == StartEstimate("loading", 12)
    assert start.passes(32) == StartEstimate("loading", 10), "a late start takes a quarter longer"


def test_warming_worker_is_told_apart_and_measured_apart_from_a_loading_one() -> None:
    start = StartingModel()
    start.move(LOADING)
    start.passes(6)
    start.move(LOADING, warming=True)
    assert start.passes(3) == StartEstimate("warming", None)
    start.move(SERVING)
    assert start.passes(0) is None
    assert start.starts.durations("m") == {"loading": [9.0], "warming": [3.0]}
    start.move(pb.PHASE_RECOVERING)
    start.passes(1)
    start.move(pb.PHASE_RECOVERING, warming=True)
    assert start.passes(1) == StartEstimate("warming", 2)
    start.move(LOADING, "other")
    assert start.passes(1) == StartEstimate("warming", 1), "the other worker is behind"


@pytest.mark.parametrize("wanted", [False, True])
def test_late_state_of_a_serving_worker_is_no_start(wanted: bool) -> None:
    """As to a router that has just started: earlier starts would seem to have taken no time."""
    start = StartingModel()
    start.pool.add("w", "here:1", BreakerLimits())
    assert start.passes(0.1, wanted=wanted) == StartEstimate("loading", None)
    start.move(SERVING)
    assert start.passes(0, wanted=wanted) is None
    assert start.starts.durations("m") == {}


def test_start_without_a_worker_has_the_reported_stage() -> None:
    start = StartingModel()
    start.starts.reported = {"m": StartReport("fetching", "fetching 1.0 of 5.0 GiB")}
    assert start.passes(30) == StartEstimate("fetching 1.0 of 5.0 GiB", None)
    start.move(LOADING)
    assert start.passes(10) == StartEstimate("loading", None), "a worker is further than its download"
    start.move(SERVING)
    assert start.passes(0) is None
    assert start.starts.durations("m") == {"fetching": [40.0], "loading": [10.0]}
    start.pool.remove("w")
    assert start.passes(5) == StartEstimate("fetching 1.0 of 5.0 GiB", 35.0)


def test_recalled_durations_count_before_those_of_this_router_and_are_bounded() -> None:
    start = StartingModel()
    start.run(5, 10)
    assert start.starts.measured == {"m"}
    assert start.starts.durations("m") == {"unknown": [15.0], "loading": [10.0]}
    start.starts.recall("m", {"loading": [100.0] * PAST_STARTS, "waking": [2.0]})
    assert start.starts.durations("m") == {
        "unknown": [15.0],
        "loading": [*[100.0] * (PAST_STARTS - 1), 10.0],
        "waking": [2.0],
    }
    start.starts.forget(["m"])
    assert (start.starts.durations("m"), start.starts.measured) == ({}, set())


def test_time_without_requests_is_no_part_of_a_start() -> None:
    start = StartingModel()
    start.passes(1000, wanted=False)
    start.run(5, 10)
    start.passes(1000, wanted=False)
    assert start.passes(0) == StartEstimate("unknown", 15)


def test_start_that_falls_back_measures_its_later_stages_anew() -> None:
    start = StartingModel()
    start.passes(1)
    start.move(LOADING)
    start.passes(100)
    start.pool.remove("w")
    start.run(0, 10)
    start.passes(0)
    start.move(LOADING)
    assert start.passes(0) == StartEstimate("loading", 10)


@pytest.mark.parametrize(("phase", "stage"), [(SLEEPING, "sleeping"), (pb.PHASE_WAKING, "waking")])
def test_first_wake_is_estimated_by_the_wake_that_the_worker_measured(phase: pb.Phase, stage: str) -> None:
    start = StartingModel()
    start.move(phase, wake_ms=4000)
    assert start.passes(1) == StartEstimate(stage, 3)


def test_stage_is_that_of_the_worker_nearest_to_serving() -> None:
    start = StartingModel()
    for worker_id, phase in (("a", SLEEPING), ("b", pb.PHASE_RECOVERING), ("c", pb.PHASE_DRAINING)):
        start.move(phase, worker_id)
    assert start.passes(0) == StartEstimate("sleeping", None)
    start.move(LOADING, "d")
    assert start.passes(0) == StartEstimate("loading", None)
    start.starts.forget(["m"])
    assert start.passes(0) == StartEstimate("loading", None)
