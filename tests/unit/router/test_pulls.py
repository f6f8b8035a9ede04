"""When fetching a prefix beats computing it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from ryzanstein.v1 import worker_pb2

from services.router.estimates import estimate
from services.router.pulls import LATENCY_MS, PAYS, pull_hint, worthwhile_pulls
from services.router.snapshot import Decision, IneligibleReason, Query, Snapshot
from tests.unit.router.fleets import Lab, LabWorker, situations, snapshot_of

STEP_MS = 20.0


def worker(*, rate: float = 2000.0, kv_bytes: float = 40_000.0, pull_rate: float = 1e9, **fields: float) -> LabWorker:
    return LabWorker(rate=rate, kv_bytes=kv_bytes, pull_rate=pull_rate, step_ms=STEP_MS, **fields)  # type: ignore[arg-type]


def query_of(*matched: int, prompt: int = 4000) -> Query:
    return Query(prompt, 16, matched_tokens=np.array(matched, dtype=float))


def test_the_saving_equals_compute_time_minus_transfer_time() -> None:
    snapshot = snapshot_of([worker(), worker()])
    query = query_of(1000, 3000)
    pulls = worthwhile_pulls(snapshot, query)
    assert pulls is not None
    assert pulls.source == 1
    assert pulls.tokens.tolist() == [2000, 0]
    transfer_ms = LATENCY_MS + 2 * STEP_MS + 2000 * 40_000 / 1e6
    assert pulls.saved_ms[0] == pytest.approx(2000 / 2 - transfer_ms)
    assert pulls.saved_ms[1] == 0
    without = snapshot_of([worker(pull_rate=0), worker(pull_rate=0)])
    saved_ms = estimate(without, query).ttft_ms - estimate(snapshot, query).ttft_ms
    assert saved_ms == pytest.approx(pulls.saved_ms)


def test_a_small_gain_is_not_taken() -> None:
    """The link is just fast enough, or just not."""
    compute_ms = 3000 / 2
    enough = 3000 * 40_000 * 1000 / (compute_ms / PAYS - LATENCY_MS - 2 * STEP_MS)
    for pull_rate, tokens in ((enough * 1.001, 3000), (enough * 0.999, 0)):
        pulls = worthwhile_pulls(snapshot_of([worker(pull_rate=pull_rate), worker()]), query_of(0, 3000))
        assert (pulls.tokens[0] if pulls else 0) == tokens


@pytest.mark.parametrize(
    ("target", "matched"),
    [
        (worker(rate=1e6), (0, 3000)),  # computes faster than the link carries
        (worker(pull_rate=0), (0, 3000)),  # configured not to pull
        (worker(kv_bytes=0), (0, 3000)),  # its blocks cannot be moved
        (worker(), (0, 32)),  # less than the latency is worth
    ],
)
def test_computing_is_chosen_unless_clearly_slower(target: LabWorker, matched: tuple[int, int]) -> None:
    assert worthwhile_pulls(snapshot_of([target, worker()]), query_of(*matched)) is None


def test_no_pull_is_made_without_a_known_longer_prefix() -> None:
    snapshot = snapshot_of([worker(), worker()])
    assert worthwhile_pulls(snapshot, Query(4000, 16)) is None
    assert worthwhile_pulls(snapshot, query_of(0, 0)) is None
    assert worthwhile_pulls(snapshot, query_of(3000, 3000)) is None


@pytest.mark.parametrize(
    ("why_not", "readable"),
    [
        (IneligibleReason.SATURATED, True),
        (IneligibleReason.DRAINING, True),
        (IneligibleReason.DISCONNECTED, False),
        (IneligibleReason.SILENT, False),
        (IneligibleReason.BREAKER, False),
        (IneligibleReason.RECOVERING, False),
        (IneligibleReason.SLEEPING, False),
        (IneligibleReason.WAKING, False),
    ],
)
def test_every_responsive_worker_can_be_read(why_not: IneligibleReason, readable: bool) -> None:
    pulls = worthwhile_pulls(snapshot_of([worker(), worker(why_not=why_not)]), query_of(0, 3000))
    assert (pulls is not None and pulls.tokens[0] == 3000) == readable


def test_of_equal_holders_the_least_busy_is_read() -> None:
    snapshot = snapshot_of([worker(), worker(queued=500), worker(queued=100), worker(queued=900)])
    pulls = worthwhile_pulls(snapshot, query_of(0, 3000, 3000, 3000))
    assert pulls is not None
    assert pulls.source == 2


@given(situations())
def test_a_pull_never_costs_more_than_computing_nor_less_than_a_cached_prefix(
    situation: tuple[Snapshot, Query],
) -> None:
    snapshot, query = situation
    pulls = worthwhile_pulls(snapshot, query)
    assert (estimate(snapshot, query).ttft_ms >= 0).all()
    if pulls is None:
        return
    assert (pulls.saved_ms >= 0).all()
    assert query.matched_tokens is not None
    assert ((pulls.tokens == 0) | (pulls.tokens + query.matched_tokens < query.prompt_tokens)).all()
    assert pulls.tokens[pulls.source] == 0


def test_the_hint_names_the_process_that_holds_the_prefix() -> None:
    lab = Lab()
    for name in ("a", "b"):
        lab.join(name, prefill_tokens_per_s=2000, kv_bytes_per_token=40_000, pull_bytes_per_s=1e9)
    lab.tell("b", incarnation="second", prefill_tokens_per_s=2000, kv_bytes_per_token=40_000, pull_bytes_per_s=1e9)
    snapshot = lab.pool.snapshot()

    def hint_for(chosen: int, query: Query) -> worker_pb2.PullHint | None:
        estimates = estimate(snapshot, query)
        return pull_hint(lab.pool, snapshot, Decision(chosen, "", estimates.at(chosen, estimates.ttft_ms)))

    hint = hint_for(0, query_of(0, 3000))
    assert hint is not None
    assert (hint.worker_id, hint.incarnation, hint.address, hint.tokens) == ("b", "second", "b:1", 3000)
    assert hint_for(1, query_of(0, 3000)) is None
    assert hint_for(0, query_of(0, 16)) is None
    assert hint_for(0, Query(4000, 16)) is None, "no lookup has been made"
