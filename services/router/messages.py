"""Decisions and workers as protobuf messages."""

from __future__ import annotations

import numpy as np
from ryzanstein.v1 import routing_pb2, worker_pb2

from services.router.breaker import BreakerState
from services.router.membership import Member
from services.router.policies.policy import Policy
from services.router.pool import Pool
from services.router.routing import Evaluation, Placement
from services.router.snapshot import ChosenEstimates, IneligibleReason

_BREAKERS = {
    BreakerState.CLOSED: routing_pb2.WorkerView.BREAKER_CLOSED,
    BreakerState.OPEN: routing_pb2.WorkerView.BREAKER_OPEN,
    BreakerState.HALF_OPEN: routing_pb2.WorkerView.BREAKER_HALF_OPEN,
}


def write_placement(decision: routing_pb2.Decision, placed: Placement, policy: str) -> None:
    """Write the decision, with the estimates of the chosen worker. In place: a copy costs more than the fields."""
    choice = placed.choice
    decision.policy, decision.worker_id, decision.reason = policy, placed.member.worker_id, choice.reason
    decision.queue_ms = int(placed.queued_s * 1000)
    _add_candidate(decision, placed.evaluation, choice.index, choice.chosen)


def explanation_message(evaluation: Evaluation, policy: Policy) -> routing_pb2.Decision:
    """The decision as it would be, with the estimates of every worker, the cheapest first."""
    chosen = evaluation.choice
    estimates, costs = policy.weigh(evaluation.snapshot, evaluation.query)
    decision = routing_pb2.Decision(
        policy=policy.name,
        worker_id=evaluation.snapshot.worker_ids[chosen.index] if chosen else "",
        reason=chosen.reason if chosen else "no worker is eligible",
    )
    for i in np.lexsort((costs, evaluation.why_not != 0)).tolist():
        _add_candidate(decision, evaluation, i, estimates.at(i, costs))
    return decision


def _add_candidate(decision: routing_pb2.Decision, evaluation: Evaluation, i: int, estimates: ChosenEstimates) -> None:
    snapshot, why_not, query = evaluation.snapshot, evaluation.why_not[i], evaluation.query
    adapter, offloaded = query.adapter, query.offloaded
    decision.candidates.add(
        worker_id=snapshot.worker_ids[i],
        eligible=not why_not,
        why_not=IneligibleReason(why_not).text if why_not else "",
        queued_tokens=int(snapshot.queued_tokens[i]),
        matched_tokens=int(estimates.matched_tokens),
        ttft_ms=estimates.ttft_ms,
        itl_ms=estimates.itl_ms,
        cost_ms=estimates.cost_ms,
        session_bound=i == query.bound,
        pulled_tokens=int(estimates.pulled_tokens),
        adapter_ms=adapter.load_ms[i] if adapter else 0.0,
        offloaded_tokens=int(offloaded.tokens[i]) if offloaded else 0,
    )


def brief_view(pool: Pool, member: Member, now: float) -> routing_pb2.WorkerView:
    """The part of a worker's view that gateways read: it changes with `Fleet.version`."""
    return routing_pb2.WorkerView(
        worker_id=member.worker_id,
        address=member.address,
        model=pool.model,
        state=worker_pb2.WorkerState(
            worker_id=member.worker_id, incarnation=member.incarnation, phase=member.state.phase
        ),
        breaker=_BREAKERS[pool.breakers.state(member, now)],
    )


def worker_view(pool: Pool, member: Member, why_not: int, sessions: int, now: float) -> routing_pb2.WorkerView:
    """A worker as this router sees it; `why_not` is its entry in a snapshot."""
    view = brief_view(pool, member, now)
    view.state.MergeFrom(member.state)
    view.unacknowledged, view.sessions = pool.load.unacknowledged(member), sessions
    view.eligible, view.why_not = not why_not, IneligibleReason(why_not).text
    return view
