"""Equal workers are equal whatever they did last, and slow ones are not."""

from __future__ import annotations

import random

import pytest

from services.router.speed_tracker import PROBED_S, SPEEDS_FRESH_S
from services.router.speeds import BATCH_DOUBLES_STEP
from tests.unit.router.fleets import LIMITS, Lab


@pytest.fixture
def growing() -> Lab:
    """A fleet whose steps take 1.4 ms and 0.2 ms for each request, on the whole."""
    lab, rng = Lab(), random.Random(0)
    for worker_id in ("a", "b", "slow"):
        lab.join(worker_id)
    for _ in range(400):
        batch = rng.randrange(1, 48)
        lab.tell(rng.choice("ab"), decode_step_ms=(1.4 + 0.2 * batch) * rng.uniform(0.9, 1.1), running=batch)
    return lab


def test_unmeasured_speeds_are_taken_from_other_workers(lab: Lab) -> None:
    lab.join("new", prefill_tokens_per_s=0, decode_step_ms=0)
    snapshot = lab.pool.snapshot()
    new = snapshot.worker_ids.index("new")
    assert snapshot.speeds.prefill_rate[new] == 10_000
    assert snapshot.speeds.step_ms[new] == 20


def test_an_idle_worker_is_judged_by_its_last_busy_step(lab: Lab) -> None:
    lab.tell("a", decode_step_ms=40, running=64)
    lab.clock.now += 2 * PROBED_S
    lab.tell("a", decode_step_ms=40, running=0)
    snapshot = lab.pool.snapshot()
    a = snapshot.worker_ids.index("a")
    batch = snapshot.speeds.step_ms[a] / snapshot.speeds.batch_ms[a] - snapshot.speeds.batch_doubles
    assert (snapshot.speeds.step_ms[a], batch, snapshot.load[a]) == (40, 64, 0)


@pytest.mark.parametrize(("rate", "share"), [(10_000, 1.0), (6_000, 1.0), (17_000, 1.0), (5_000, 1.5)])
def test_shares_separate_slow_workers_from_slow_measurements(rate: float, share: float) -> None:
    """A share is of time; but equal workers measure speeds that differ by some."""
    lab = Lab()
    for worker_id in ("a", "b", "odd"):
        lab.join(worker_id, running=8, prefill_tokens_per_s=rate if worker_id == "odd" else 10_000)
    lab.clock.now += 2 * PROBED_S
    for worker_id in ("a", "b", "odd"):
        lab.pool.book(worker_id, seq=1, tokens=100)
    assert lab.pool.snapshot().share[2] == pytest.approx(share)


def test_equal_workers_have_equal_shares_however_their_rates_swing() -> None:
    lab = Lab()
    for worker_id in ("a", "b", "c"):
        lab.join(worker_id, waiting=8)
    for worker_id in ("a", "b", "c"):
        lab.pool.book(worker_id, seq=1, tokens=100)
    for second in range(60):
        lab.clock.now += 1
        for place, worker_id in enumerate(("a", "b", "c")):
            rate = 18_000 if (second + place) % 3 == 0 else 6_000
            lab.tell(worker_id, waiting=8, prefill_tokens_per_s=rate)
        if second > 20:
            assert lab.pool.snapshot().share == pytest.approx([1, 1, 1])


def test_a_probe_is_outweighed_by_the_first_second_of_work() -> None:
    lab = Lab()
    for worker_id, rate in (("a", 16_000), ("b", 16_000), ("unlucky", 2_000)):
        lab.join(worker_id, prefill_tokens_per_s=rate)
    for _ in range(10):
        lab.clock.now += 0.1
        for worker_id in ("a", "b", "unlucky"):
            lab.tell(worker_id, running=4, prefill_tokens_per_s=16_000)
    lab.clock.now += SPEEDS_FRESH_S
    assert lab.pool.snapshot().speeds.similar_rate == pytest.approx([16_000, 16_000, 16_000])


def test_a_worker_that_restarts_is_measured_anew() -> None:
    lab = Lab()
    for worker_id in ("a", "b"):
        lab.join(worker_id, running=8)
    for worker_id in ("a", "b"):
        lab.tell(worker_id, running=8, computed_tokens=100)
    lab.clock.now += 1
    lab.tell("a", running=8, incarnation="second", prefill_tokens_per_s=5_000)
    lab.clock.now += 2 * PROBED_S
    assert lab.pool.snapshot().share[0] == pytest.approx(4 / 3)


def test_an_old_measurement_yields_to_recent_measurements_of_other_workers() -> None:
    lab = Lab()
    for worker_id, step_ms in (("idle", 40), ("busy", 10)):
        lab.join(worker_id, decode_step_ms=step_ms, running=4)
    lab.clock.now += 2 * PROBED_S
    assert lab.pool.snapshot().speeds.step_ms == pytest.approx([38.6, 10], abs=0.1)
    for _ in range(14):
        lab.clock.now += 1
        lab.tell("idle", decode_step_ms=40)
        lab.tell("busy", decode_step_ms=10, running=4)
    assert lab.pool.snapshot().speeds.step_ms == pytest.approx([25, 10], abs=0.5)
    for _ in range(45):
        lab.clock.now += 1
        lab.tell("busy", decode_step_ms=10, running=4)
    equal = lab.pool.snapshot().speeds.step_ms
    assert equal == pytest.approx([11.9, 11.9], abs=0.1)
    lab.tell("idle", decode_step_ms=38, running=1)
    lab.clock.now += 2 * SPEEDS_FRESH_S
    assert lab.pool.snapshot().speeds.step_ms == pytest.approx([38, 10], abs=0.3)


def test_steps_are_compared_as_if_their_batches_were_equal(growing: Lab) -> None:
    """On a CPU a step for thirty requests takes several times as long as for one."""
    growing.tell("a", decode_step_ms=1.6, running=1)
    growing.tell("b", decode_step_ms=7.8, running=32)
    growing.tell("slow", decode_step_ms=24, running=16)
    growing.clock.now += 2 * PROBED_S
    speeds = growing.pool.snapshot().speeds
    assert speeds.batch_doubles == pytest.approx(7, rel=0.2)
    assert speeds.batch_ms / speeds.batch_ms[0] == pytest.approx([1, 1, 5.2], rel=0.1)


def test_steps_that_were_held_up_tell_little_of_batches(growing: Lab) -> None:
    before = growing.pool.snapshot().speeds.batch_doubles
    for _ in range(5):
        growing.tell("a", decode_step_ms=5000, running=1)
    growing.clock.now += 2 * SPEEDS_FRESH_S
    assert growing.pool.snapshot().speeds.batch_doubles == pytest.approx(before, rel=0.3)


def test_probes_make_no_worker_slow() -> None:
    """Probes run while other processes start: a slow probe must not keep a worker from getting requests."""
    lab = Lab()
    for worker_id, step_ms, rate in (("a", 5.5, 5_000), ("b", 1.5, 17_000), ("c", 1.6, 16_000)):
        lab.join(worker_id, decode_step_ms=step_ms, prefill_tokens_per_s=rate)
    speeds = lab.pool.snapshot().speeds
    assert speeds.step_ms == pytest.approx([1.6, 1.6, 1.6])
    assert speeds.similar_rate == pytest.approx([16_000, 16_000, 16_000])
    lab.tell("b", decode_step_ms=3.0, running=4)
    lab.clock.now += 2 * PROBED_S
    speeds = lab.pool.snapshot().speeds
    assert speeds.batch_ms == pytest.approx([3.0 / (BATCH_DOUBLES_STEP + 4)] * 3)


def test_a_delayed_worker_does_not_slow_the_estimates_of_idle_workers() -> None:
    """Ranks were stopped for seconds: the worker reports a slow step, and then gets no requests."""
    lab = Lab()
    for worker_id, step_ms in (("held up", 500), ("idle", 10), ("busy", 10)):
        lab.join(worker_id, decode_step_ms=step_ms, running=4)
    for _ in range(90):
        lab.clock.now += 1
        lab.tell("busy", decode_step_ms=30, running=64)
        held_up, idle, busy = lab.pool.snapshot().speeds.batch_ms
        assert min(10 / 68, 30 / 128) <= idle <= 30 / 128
        assert busy == pytest.approx(30 / 128)
    assert held_up < 2 * busy


def test_load_is_compared_by_speed_and_only_while_the_fleet_is_busy() -> None:
    lab = Lab()
    for worker_id, rate in (("a", 10_000), ("b", 10_000), ("fast", 20_000)):
        lab.join(worker_id, prefill_tokens_per_s=rate, running=1)
    lab.clock.now += 2 * PROBED_S
    lab.tell("a", running=6, waiting=2)
    lab.tell("b")
    assert lab.pool.snapshot().load_share.tolist() == [1, 1, 1]
    lab.tell("fast", running=8, prefill_tokens_per_s=20_000)
    lab.pool.book("b", seq=1, tokens=10)
    assert lab.pool.snapshot().load_share == pytest.approx([24 / 13, 3 / 13, 12 / 13])


def test_speeds_serve_the_decisions_of_a_moment_but_a_worker_that_joins_counts_at_once() -> None:
    lab = Lab()
    lab.join("a", prefill_tokens_per_s=1000)
    before = lab.pool.snapshot()
    lab.tell("a", prefill_tokens_per_s=2000, queued_prefill_tokens=5)
    soon = lab.pool.snapshot()
    assert soon.speeds is before.speeds
    assert soon.queued_tokens == [5]
    lab.clock.now += 2 * SPEEDS_FRESH_S
    assert lab.pool.snapshot().speeds.prefill_rate == [2000]
    lab.join("b", prefill_tokens_per_s=3000)
    assert lab.pool.snapshot().speeds.prefill_rate.tolist() == [2000, 3000]
    lab.pool.add("c", "c:1", LIMITS)
    assert lab.pool.snapshot().speeds.prefill_rate.tolist() == [2000, 3000, 2500]
    lab.tell("c", prefill_tokens_per_s=4000)
    assert lab.pool.snapshot().speeds.prefill_rate.tolist() == [2000, 3000, 4000]


def test_old_measurements_count_when_no_worker_has_run_for_long() -> None:
    lab = Lab()
    for worker_id, step_ms in (("slow", 40), ("fast", 10)):
        lab.join(worker_id, decode_step_ms=step_ms, running=4)
    lab.clock.now += 3600
    assert lab.pool.snapshot().speeds.step_ms == pytest.approx([40, 10])
