from __future__ import annotations

import time
from dataclasses import replace

import pytest
from ryzanstein.v1 import routing_pb2
from ryzanstein.v1 import worker_pb2 as pb

from services.common.leases import Lease
from services.router.fleet import Fleet
from services.router.load_tracker import UNACKNOWLEDGED_S
from services.router.membership import SILENT_S
from services.router.snapshot import IneligibleReason
from tests.unit.router.fleets import LIMITS, Lab


@pytest.mark.parametrize(
    ("phase", "why_not"),
    [
        (pb.PHASE_UNSPECIFIED, IneligibleReason.LOADING),
        (pb.PHASE_LOADING, IneligibleReason.LOADING),
        (pb.PHASE_RECOVERING, IneligibleReason.RECOVERING),
        (pb.PHASE_DRAINING, IneligibleReason.DRAINING),
        (pb.PHASE_SLEEPING, IneligibleReason.SLEEPING),
        (pb.PHASE_WAKING, IneligibleReason.WAKING),
        (pb.PHASE_SERVING, IneligibleReason.ELIGIBLE),
    ],
)
def test_only_serving_workers_are_eligible(lab: Lab, phase: pb.Phase, why_not: IneligibleReason) -> None:
    lab.tell("a", phase=phase)
    assert lab.why_not("a") is why_not


def test_a_worker_is_ineligible_until_its_first_state(lab: Lab) -> None:
    lab.pool.add("new", "new:1", LIMITS)
    assert lab.why_not("new") is IneligibleReason.DISCONNECTED
    lab.tell("new")
    assert lab.why_not("new") is IneligibleReason.ELIGIBLE


def test_a_worker_that_speaks_more_often_is_missed_sooner(lab: Lab) -> None:
    lab.tell("a", heartbeat_ms=1000)
    lab.tell("b")  # version without a heartbeat interval
    lab.clock.now += 2.4
    assert lab.why_not("a") is IneligibleReason.ELIGIBLE
    lab.clock.now += 0.2
    assert lab.why_not("a") is IneligibleReason.SILENT
    assert lab.why_not("b") is IneligibleReason.ELIGIBLE


def test_a_heartbeat_without_news_keeps_the_last_state(lab: Lab) -> None:
    lab.tell("a", queued_prefill_tokens=100)
    lab.clock.now += SILENT_S - 0.1
    lab.pool.on_heartbeat("a")
    lab.clock.now += 0.2
    assert lab.why_not("a") is IneligibleReason.ELIGIBLE
    assert lab.why_not("b") is IneligibleReason.SILENT
    assert lab.pool.snapshot().queued_tokens[0] == 100


def test_an_unacknowledged_dispatch_expires(lab: Lab) -> None:
    lab.pool.book("a", seq=1, tokens=50)
    lab.clock.now += 1
    lab.pool.book("a", seq=2, tokens=30)
    lab.clock.now += UNACKNOWLEDGED_S - 1
    lab.tell("a")
    assert lab.queued("a") == 30
    lab.clock.now += 1
    lab.tell("a")
    assert lab.queued("a") == 0


def test_a_dispatch_can_be_taken_back(lab: Lab) -> None:
    lab.pool.book("a", seq=1, tokens=50)
    lab.pool.book("a", seq=2, tokens=30)
    lab.pool.unbook("a", seq=1)
    lab.pool.unbook("a", seq=1)
    lab.pool.unbook("gone", seq=2)
    assert lab.queued("a") == 30


def test_work_counts_from_its_booking_and_converges_to_the_computed_tokens() -> None:
    lab = Lab()
    lab.join("a", waiting=8)
    lab.join("b", waiting=8)
    lab.pool.book("a", seq=1, tokens=30)
    lab.pool.book("b", seq=1, tokens=30)
    lab.pool.book("a", seq=2, tokens=60)
    assert lab.pool.snapshot().share == pytest.approx([90 / 60, 30 / 60])
    assert lab.pool.snapshot().excess == pytest.approx([30, 0])
    lab.tell("a", waiting=8, acked={"router": 2}, queued_prefill_tokens=20, computed_tokens=10)  # the rest was cached
    assert lab.pool.snapshot().share == pytest.approx([1.0, 1.0])


def test_a_dispatch_that_is_taken_back_is_no_work() -> None:
    lab = Lab()
    lab.join("a", waiting=8, queued_prefill_tokens=30)
    lab.join("b", waiting=8, queued_prefill_tokens=30)
    lab.pool.book("a", seq=1, tokens=60)
    lab.pool.unbook("a", seq=1)
    assert lab.pool.snapshot().share == pytest.approx([1.0, 1.0])


def test_work_done_before_joining_gives_no_tenant_a_claim() -> None:
    lab = Lab()
    lab.join("a", waiting=8, computed_tokens=1_000_000)
    lab.join("b", waiting=8)
    for worker_id, computed in (("a", 1_000_100), ("b", 100)):
        lab.tell(worker_id, waiting=8, computed_tokens=computed)
    assert lab.pool.snapshot().share == pytest.approx([1.0, 1.0])
    lab.tell("a", waiting=8, incarnation="second", computed_tokens=0)
    assert lab.pool.snapshot().share == pytest.approx([1.0, 1.0])


def test_workers_keep_their_indices_when_other_workers_leave(lab: Lab) -> None:
    for i, worker_id in enumerate("abcd"):
        lab.pool.book(worker_id, seq=i, tokens=i + 1)
    lab.pool.remove("b")
    lab.join("e")
    assert [lab.queued(w) for w in "acde"] == [1, 3, 4, 0]
    lab.pool.book("d", seq=9, tokens=10)
    assert lab.queued("d") == 14


def test_three_faults_eject_a_worker_until_its_restart(lab: Lab) -> None:
    for _ in range(3):
        lab.pool.fault("a", "another incarnation")
    assert lab.why_not("a") is IneligibleReason.ELIGIBLE
    for _ in range(3):
        lab.pool.fault("a", "first")
    assert lab.why_not("a") is IneligibleReason.BREAKER
    lab.tell("a", incarnation="second")
    assert lab.why_not("a") is IneligibleReason.ELIGIBLE


def test_reports_about_an_earlier_incarnation_are_ignored(lab: Lab) -> None:
    for _ in range(3):
        lab.pool.fault("a", "first")
    assert lab.why_not("a") is IneligibleReason.BREAKER
    for tell in (lab.pool.success, lab.pool.no_verdict):
        tell("a", "another incarnation")
        assert lab.why_not("a") is IneligibleReason.BREAKER


def test_a_worker_that_joins_again_begins_anew(lab: Lab) -> None:
    for _ in range(3):
        lab.pool.fault("a", "first")
    lab.pool.add("a", "elsewhere:1", LIMITS)
    assert (lab.pool.members["a"].address, lab.why_not("a")) == ("elsewhere:1", IneligibleReason.DISCONNECTED)
    lab.tell("a")
    assert lab.why_not("a") is IneligibleReason.ELIGIBLE


def test_a_half_open_worker_gets_one_probe(lab: Lab) -> None:
    for _ in range(3):
        lab.pool.fault("a", "first")
    lab.clock.now += 5
    lab.tell("a")
    assert lab.why_not("a") is IneligibleReason.ELIGIBLE
    lab.pool.book("a", seq=1, tokens=1)
    assert lab.why_not("a") is IneligibleReason.BREAKER
    lab.pool.no_verdict("a", "first")
    assert lab.why_not("a") is IneligibleReason.ELIGIBLE
    lab.pool.book("a", seq=2, tokens=1)
    lab.pool.success("a", "first")
    assert lab.why_not("a") is IneligibleReason.ELIGIBLE
    lab.pool.book("a", seq=3, tokens=1)
    assert lab.why_not("a") is IneligibleReason.ELIGIBLE


def test_a_queue_of_more_than_thirty_seconds_is_saturation(lab: Lab) -> None:
    lab.tell("a", queued_prefill_tokens=299_000)
    lab.pool.book("a", seq=1, tokens=900)
    assert lab.why_not("a") is IneligibleReason.ELIGIBLE
    lab.pool.book("a", seq=2, tokens=900)
    assert lab.why_not("a") is IneligibleReason.SATURATED


def test_draining_is_over_when_the_worker_restarts(lab: Lab) -> None:
    lab.pool.set_draining("a", True)
    lab.tell("a")
    assert lab.why_not("a") is IneligibleReason.DRAINING
    lab.tell("a", incarnation="second")
    assert lab.why_not("a") is IneligibleReason.ELIGIBLE


def test_a_snapshot_does_not_change(lab: Lab) -> None:
    snapshot = lab.pool.snapshot()
    lab.tell("a", queued_prefill_tokens=5, phase=pb.PHASE_DRAINING)
    lab.pool.remove("b")
    assert snapshot.queued_tokens.sum() == 0
    assert not snapshot.why_not.any()
    assert snapshot.worker_ids == ("a", "b", "c", "d")


def test_shares_are_of_recent_work_and_only_while_the_fleet_is_busy(lab: Lab) -> None:
    lab.tell("a", computed_tokens=400)
    assert lab.pool.snapshot().share.tolist() == [1, 1, 1, 1]
    for worker_id in "abcd":
        lab.tell(worker_id, running=4, computed_tokens=400 if worker_id == "a" else 0)
    assert lab.pool.snapshot().share.tolist() == [4, 0, 0, 0]
    lab.clock.now += 20
    for worker_id, computed in zip("abcd", (400, 200, 0, 0), strict=True):
        lab.tell(worker_id, running=4, computed_tokens=computed)
    assert lab.pool.snapshot().share.tolist() == [2, 2, 0, 0]
    lab.clock.now += 7 * 24 * 3600
    for worker_id, computed in zip("abcd", (400, 200, 200, 0), strict=True):
        lab.tell(worker_id, running=4, computed_tokens=computed)
    assert lab.pool.snapshot().share.round(6).tolist() == [0, 0, 4, 0]


def test_a_new_worker_has_no_claim_to_earlier_work(lab: Lab) -> None:
    for worker_id in ("a", "b", "c"):
        lab.tell(worker_id, waiting=20, computed_tokens=100)
    lab.join("new", waiting=20)
    snapshot = lab.pool.snapshot()
    assert snapshot.share[snapshot.worker_ids.index("new")] == pytest.approx(1.0)


def test_the_first_token_of_a_trial_closes_a_breaker() -> None:
    fleet = Fleet("r", 30.0, replace(LIMITS, open_min_s=0.0), lambda: None)
    for worker_id in ("w", "other"):
        fleet.join(Lease(worker_id, "i", "host:1", "tiny", "serving"))
    pool = fleet.pools["tiny"]

    def reports(result: routing_pb2.Outcome.Result) -> bool:
        fleet.report(routing_pb2.Outcome(worker_id="w", result=result))
        return pool.breakers.on_trial(pool.members["w"])

    assert [reports(routing_pb2.Outcome.RESULT_FAULT) for _ in range(LIMITS.faults)] == [False, False, True]
    pool.book("w", 1, tokens=16)
    assert pool.breakers.ejected(time.monotonic()), "one request at a time"
    assert not reports(routing_pb2.Outcome.RESULT_BEGUN)
    assert not pool.breakers.ejected(time.monotonic())


def test_version_of_the_list_of_workers_changes_when_a_breaker_half_opens_by_time() -> None:
    fleet = Fleet("r", 30.0, LIMITS, lambda: None)
    fleet.join(Lease("w", "i", "host:1", "tiny", "serving"))
    for _ in range(LIMITS.faults):
        fleet.report(routing_pb2.Outcome(worker_id="w", result=routing_pb2.Outcome.RESULT_FAULT))
    now = time.monotonic()
    assert fleet.version(now) == fleet.version(now)
    assert fleet.version(now + LIMITS.open_max_s) != fleet.version(now)
