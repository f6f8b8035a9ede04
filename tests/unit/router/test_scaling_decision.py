"""How many workers a pool gets: bounded, fast from zero, by demand, and never to and fro."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.scaling.decision import (
    SUSTAINED_S,
    Demand,
    History,
    PoolCapacity,
    Reason,
    ScalingDecision,
    Targets,
    desired,
    load,
)
from services.router.scaling.pools import WEEKDAYS, ScaledPool

MEASURED = PoolCapacity(replicas=1, workers=1, prefill_rate=1000.0, batch=8.0, kv_blocks=100.0)
TARGETS = Targets(least=1, most=8, first_token_s=2.0, down_after_s=20.0, idle_s=30.0)

counts = st.integers(0, 40)
demands = st.builds(
    Demand,
    held=counts,
    held_tokens=st.integers(0, 50_000),
    tokens_per_s=st.floats(0, 20_000),
    busy=counts,
    queued_tokens=st.integers(0, 50_000),
    kv_used=st.integers(0, 2_000),
    idle_s=st.floats(0, 1_000),
    complete=st.booleans(),
)
targets = st.builds(
    Targets,
    least=st.integers(0, 3),
    most=st.integers(3, 12),
    down_after_s=st.integers(4, 20).map(float),
    idle_s=st.integers(4, 40).map(float),
)
speeds = st.builds(
    PoolCapacity,
    replicas=st.integers(0, 12),
    prefill_rate=st.sampled_from([0.0, 300.0, 5_000.0]),
    batch=st.sampled_from([0.0, 1.0, 16.0]),
    kv_blocks=st.sampled_from([0.0, 50.0]),
    last_is_emptiest=st.booleans(),
)


def run(
    demand: Sequence[Demand], capacity: PoolCapacity, wanted: Targets
) -> Iterator[tuple[float, int, ScalingDecision]]:
    """The replicas before each decision, one a second, which is carried out at once."""
    history = History.new(0.0, capacity.replicas)
    for now, moment in enumerate(demand):
        capacity = replace(capacity, workers=capacity.replicas)
        decision, history = desired(float(now), moment, capacity, wanted, history)
        yield float(now), capacity.replicas, decision
        capacity = replace(capacity, replicas=decision.replicas)


@given(st.lists(demands, min_size=1, max_size=40), speeds, targets)
def test_replicas_stay_within_bounds(demand: list[Demand], capacity: PoolCapacity, wanted: Targets) -> None:
    for _, _, decision in run(demand, capacity, wanted):
        assert wanted.least <= decision.replicas <= wanted.most


@given(demands, speeds, targets, st.integers(1, 40))
def test_pool_at_zero_grows_in_the_evaluation_that_sees_a_held_request(
    demand: Demand, capacity: PoolCapacity, wanted: Targets, held: int
) -> None:
    at_zero, asleep = replace(capacity, replicas=0), replace(wanted, least=0)
    moments = [Demand(idle_s=1000.0), Demand(idle_s=1000.0), replace(demand, held=held)]
    *before, (_, replicas, decision) = run(moments, at_zero, asleep)
    assert [each.replicas for *_, each in before] == [0, 0]
    assert replicas == 0
    assert decision.replicas >= 1
    assert decision.reason not in (Reason.KEEP, Reason.IDLE, Reason.SURPLUS)


@given(demands, speeds, targets)
def test_constant_demand_changes_no_settled_pool(demand: Demand, capacity: PoolCapacity, wanted: Targets) -> None:
    """Settled: after each of a dozen workers could have been removed, however long the last one is not the emptiest."""
    settling = int(3 * wanted.down_after_s + max(wanted.idle_s, SUSTAINED_S)) + 15
    decisions = list(run([demand] * (settling + 50), capacity, wanted))
    late = {decision.replicas for now, _, decision in decisions if now >= settling}
    assert len(late) == 1


@given(st.lists(demands, min_size=30, max_size=120), speeds, targets)
def test_pool_never_shrinks_soon_after_growth(demand: list[Demand], capacity: PoolCapacity, wanted: Targets) -> None:
    raised_at = 0.0
    for now, replicas, decision in run(demand, capacity, wanted):
        if decision.replicas > replicas:
            raised_at = now
        if decision.replicas < replicas <= wanted.most:
            patience = wanted.idle_s if decision.reason is Reason.IDLE else wanted.down_after_s
            assert now - raised_at >= patience


@given(st.lists(demands, min_size=30, max_size=120), speeds, targets)
def test_pool_shrinks_by_one_worker_within_the_window_s_largest_need(
    demand: list[Demand], capacity: PoolCapacity, wanted: Targets
) -> None:
    capacity = replace(capacity, last_is_emptiest=True)
    for now, replicas, decision in run(demand, capacity, wanted):
        if decision.reason is Reason.SURPLUS:
            assert decision.replicas == replicas - 1
            moments = demand[max(0, int(now - wanted.down_after_s) + 1) : int(now) + 1]
            needed = max(math.ceil(load(moment, capacity, wanted)[0]) for moment in moments)
            assert needed <= decision.replicas or needed > wanted.most
            assert demand[int(now)].complete


@given(st.lists(demands, min_size=30, max_size=120), speeds, targets)
def test_pool_goes_to_zero_only_after_idleness(demand: list[Demand], capacity: PoolCapacity, wanted: Targets) -> None:
    active_at = 0.0
    for now, replicas, decision in run(demand, capacity, wanted):
        if demand[int(now)].requests:
            active_at = now
        if replicas and not decision.replicas:
            assert wanted.least == 0
            assert now - active_at >= wanted.idle_s


@pytest.mark.parametrize(
    ("demand", "replicas", "reason"),
    [
        (Demand(busy=8, queued_tokens=5_000), 3, Reason.BACKLOG),  # 5 s of prefill for 2 s of patience
        (Demand(held=8, held_tokens=5_000), 3, Reason.BACKLOG),
        (Demand(busy=1, queued_tokens=50_000), 1, Reason.KEEP),  # one request has one worker, however long it is
        (Demand(busy=2, tokens_per_s=1_500.0), 3, Reason.ARRIVALS),
        (Demand(busy=20), 3, Reason.PACE),
        (Demand(busy=7, kv_used=170), 3, Reason.KV),
        (Demand(busy=7, kv_used=70), 1, Reason.KEEP),
        (Demand(busy=1000), 8, Reason.PACE),
    ],
)
def test_pool_grows_by_demand_against_measured_speeds(demand: Demand, replicas: int, reason: Reason) -> None:
    decisions = list(run([demand] * 6, MEASURED, TARGETS))
    assert decisions[-1][2].replicas == replicas
    assert {decision.reason for *_, decision in decisions} == {Reason.KEEP, reason}


def test_short_burst_adds_no_worker() -> None:
    burst, quiet = Demand(busy=30), Demand(busy=2)
    assert {
        each.replicas for *_, each in run([quiet, burst, burst, quiet, burst, burst, quiet], MEASURED, TARGETS)
    } == {1}


def test_unmeasured_pool_starts_one_worker_however_many_requests_are_held() -> None:
    (_, _, decision), *_ = run(
        [Demand(held=1000, held_tokens=10**6)], PoolCapacity(replicas=0), replace(TARGETS, least=0)
    )
    assert (decision.replicas, decision.reason) == (1, Reason.HELD)


def test_measured_pool_at_zero_starts_as_many_workers_as_its_requests_need() -> None:
    at_zero = replace(MEASURED, replicas=0)
    (_, _, decision), *_ = run([Demand(held=20, held_tokens=2_000)], at_zero, replace(TARGETS, least=0))
    assert (decision.replicas, decision.reason) == (3, Reason.PACE)


def shrinks(capacity: PoolCapacity, demand: Demand, seconds: int) -> list[float]:
    """When a worker was removed."""
    return [now for now, replicas, each in run([demand] * seconds, capacity, TARGETS) if each.replicas < replicas]


def test_surplus_worker_leaves_after_the_stabilisation_time_and_later_unless_emptiest() -> None:
    pool = replace(MEASURED, replicas=2)
    assert shrinks(pool, Demand(busy=1), 30) == [20.0]
    assert shrinks(replace(pool, last_is_emptiest=False), Demand(busy=1), 60) == [40.0]


def test_pool_keeps_its_workers_while_a_router_does_not_answer() -> None:
    pool = replace(MEASURED, replicas=3)
    assert shrinks(pool, Demand(busy=1, complete=False), 100) == []
    at_zero = replace(TARGETS, least=0)
    silent = [Demand(idle_s=500.0, complete=False)] * 100
    assert {each.replicas for *_, each in run(silent, pool, at_zero)} == {3}


def test_pool_shrinks_no_further_while_a_removed_worker_hands_over() -> None:
    history = History.new(0.0, 3)
    for now in range(60):
        leaving = replace(MEASURED, replicas=3, workers=4)
        decision, history = desired(float(now), Demand(busy=1), leaving, TARGETS, history)
        assert decision.replicas == 3


@given(demands, speeds, targets)
def test_pool_at_zero_stays_there_without_a_request(demand: Demand, capacity: PoolCapacity, wanted: Targets) -> None:
    """Also while the tokens of past requests decay."""
    past = replace(demand, held=0, busy=0)
    asleep = replace(wanted, least=0)
    assert {each.replicas for *_, each in run([past] * 40, replace(capacity, replicas=0), asleep)} == {0}


def test_idle_pool_goes_to_zero_and_stays_there_for_a_new_leader() -> None:
    asleep = replace(TARGETS, least=0)
    decisions = list(run([Demand(idle_s=1_000.0)] * 40, replace(MEASURED, replicas=2), asleep))
    assert next(now for now, _, each in decisions if each.replicas == 0) == 30.0
    assert next(each.reason for *_, each in decisions if each.replicas == 0) is Reason.IDLE
    (_, _, first), *_ = run([Demand(idle_s=0.0)], replace(MEASURED, replicas=0), asleep)
    assert first.replicas == 0


def test_changed_bounds_hold_at_once() -> None:
    busy = Demand(busy=60)
    (_, _, lowered), *_ = run([busy], replace(MEASURED, replicas=8), replace(TARGETS, most=4))
    assert (lowered.replicas, lowered.reason) == (4, Reason.BOUNDS)
    (_, _, raised), *_ = run([Demand()], MEASURED, replace(TARGETS, least=2))
    assert (raised.replicas, raised.reason) == (2, Reason.BOUNDS)


@pytest.mark.parametrize(
    ("at", "least"),
    [
        ("Mon 07:54:59", 1),
        ("Mon 07:55:00", 3),  # workers have five minutes to start
        ("Mon 08:54:59", 3),
        ("Mon 08:55:00", 6),
        ("Mon 09:59:59", 6),
        ("Mon 10:00:00", 1),
        ("Tue 08:30:00", 1),
        ("Tue 09:30:00", 6),
        ("Sun 23:55:00", 2),  # the hour begins on Monday
        ("Mon 23:55:00", 1),
        ("Thu 12:30:00", 1),  # below the pool's own min
        ("Thu 13:30:00", 8),  # above its max
    ],
)
def test_floor_of_the_schedule_holds_in_its_hours_and_never_above_max(at: str, least: int) -> None:
    floors = [
        {"hour": 8, "min": 3, "days": ["mon"]},
        {"hour": 9, "min": 6},
        {"hour": 9, "min": 2},
        {"hour": 0, "min": 2, "days": ["mon"]},
        {"hour": 12, "min": 1, "days": ["thu"]},
        {"hour": 13, "min": 20, "days": ["thu"]},
    ]
    names: dict[str, object] = {"name": "default", "mode": "builtin", "statefulSet": "set", "models": ["tiny"]}
    own = {"firstTokenSeconds": 2, "tokenMilliseconds": 100, "kvPercent": 80, "idleSeconds": 30}
    bounds = {"min": 1, "max": 8, "scaleDownAfterSeconds": 20, "schedule": floors}
    pool = ScaledPool.model_validate(names | own | bounds)
    day, _, time = at.partition(" ")
    now = datetime.fromisoformat(f"2026-11-{23 + WEEKDAYS.index(day.lower())} {time}+00:00")  # type: ignore[arg-type]
    targets = pool.targets(now)
    assert (targets.least, targets.most) == (least, 8)
    quiet = [each.replicas for *_, each in run([Demand()] * 40, replace(MEASURED, replicas=1), targets)]
    assert set(quiet) == {least}
    busy = [each.replicas for *_, each in run([Demand(busy=40)] * 6, replace(MEASURED, replicas=1), targets)]
    assert busy[-1] == max(5, least), "the demand counts above the floor"
