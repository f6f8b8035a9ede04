"""Decisions and workers as protobuf messages."""

from __future__ import annotations

import numpy as np
from ryzanstein.v1 import routing_pb2, worker_pb2

from services.router.breaker import BreakerState
from services.router.policies.cost import cost_terms
from services.router.pool import Member
from services.router.routing import Placement
from services.router.snapshot import WhyNot

_BREAKERS = {
    BreakerState.CLOSED: routing_pb2.WorkerView.BREAKER_CLOSED,
    BreakerState.OPEN: routing_pb2.WorkerView.BREAKER_OPEN,
    BreakerState.HALF_OPEN: routing_pb2.WorkerView.BREAKER_HALF_OPEN,
}


def decision_message(placed: Placement, policy: str, decode_weight: float, *, everyone: bool) -> routing_pb2.Decision:
    """The decision and the terms of the chosen worker, or of `everyone`, the cheapest first."""
    snapshot, query, why_not = placed.snapshot, placed.query, placed.why_not
    chosen = placed.choice
    terms = chosen.terms if chosen else None
    if terms is None:
        terms = cost_terms(snapshot, query, decode_weight)
    shown = np.lexsort((terms.cost_ms, why_not != 0)).tolist() if everyone or not chosen else [chosen.index]
    return routing_pb2.Decision(
        policy=policy,
        worker_id=snapshot.worker_ids[chosen.index] if chosen else "",
        reason=chosen.reason if chosen else "nobody is eligible",
        queue_ms=int(placed.queued_s * 1000),
        candidates=[
            routing_pb2.Candidate(
                worker_id=snapshot.worker_ids[i],
                eligible=not why_not[i],
                why_not=WhyNot(why_not[i]).text,
                queued_tokens=int(snapshot.queued_tokens[i]),
                matched_tokens=int(terms.matched_tokens[i]),
                ttft_ms=terms.ttft_ms[i],
                itl_ms=terms.itl_ms[i],
                cost_ms=terms.cost_ms[i],
                session_bound=i == query.bound,
                pulled_tokens=int(terms.pulled_tokens[i]),
            )
            for i in shown
        ],
    )


def worker_view(member: Member, model: str, why_not: int, sessions: int, now: float) -> routing_pb2.WorkerView:
    """A worker as this router sees it; `why_not` is its entry in a snapshot."""
    return routing_pb2.WorkerView(
        worker_id=member.worker_id,
        address=member.address,
        model=model,
        state=member.state if member.state.worker_id else worker_pb2.WorkerState(worker_id=member.worker_id),
        breaker=_BREAKERS[member.breaker.state(now)],
        unacknowledged=len(member.dispatches),
        sessions=sessions,
        eligible=not why_not,
        why_not=WhyNot(why_not).text,
    )
