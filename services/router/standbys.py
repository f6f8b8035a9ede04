"""Chooses a request's standby: it gets copies of the request's KV, and continues the request if its worker is lost.

The worker that holds most of the prefix comes first, so a conversation keeps its standby. Rendezvous hashing decides
between those that hold about the same, so standbys spread over the pool. The next best are named with it, so that the
worker that sends copies can replace a lost standby without a call.
"""

from __future__ import annotations

import numpy as np
from ryzanstein.v1 import routing_pb2, worker_pb2

from services.router.membership import Member
from services.router.routing import Evaluation, Placement
from services.router.snapshot import rendezvous

_MOST_CANDIDATES = 8
_PREFIX_STEP = 512  # tokens: prefixes that differ by less count as equal
_SPARES = 2  # more than two losses in one text are too rare to name further workers
_ROOM = 0.5  # share of a standby's KV blocks that its own requests may hold


def standby_of(request: routing_pb2.RouteRequest, placed: Placement) -> worker_pb2.Standby | None:
    """The standby of a placed request, with its spares; None if it is too short, or no other worker can be one."""
    wanted = placed.member.state.standby_tokens
    if not wanted or request.prompt_tokens + request.max_tokens < wanted:
        return None
    able = [member for member in _candidates(placed.evaluation) if _has_room(member) and member is not placed.member]
    able.sort(key=lambda member: not _apart(member, placed.member))  # stable
    named = [worker_pb2.Standby(worker_id=member.worker_id, address=member.address) for member in able[: 1 + _SPARES]]
    if not named:
        return None
    named[0].spares.extend(named[1:])
    return named[0]


def _candidates(evaluation: Evaluation) -> list[Member]:
    """Some eligible workers, the best first."""
    snapshot, query = evaluation.snapshot, evaluation.query
    scores = rendezvous(snapshot.identities, query.session_key or query.request_key) * 2.0**-64
    if query.matched_tokens is not None:
        scores = scores + query.matched_tokens // _PREFIX_STEP
    scores = np.where(evaluation.why_not == 0, scores, -1.0)
    best = (
        np.argpartition(scores, -_MOST_CANDIDATES)[-_MOST_CANDIDATES:]
        if len(scores) > _MOST_CANDIDATES
        else np.arange(len(scores))
    )
    best = best[np.argsort(-scores[best])]
    ids = [snapshot.worker_ids[i] for i in best.tolist() if scores[i] >= 0]
    return [evaluation.pool.members[worker_id] for worker_id in ids if worker_id in evaluation.pool.members]


def _has_room(member: Member) -> bool:
    """Whether the worker's KV blocks can be copied, and its own requests leave room for copies."""
    state = member.state
    return state.kv_bytes_per_token > 0 and state.kv_blocks_used <= _ROOM * state.kv_blocks_total


def _apart(one: Member, other: Member) -> bool:
    """Whether two workers are not known to be on the same machine."""
    return not one.state.node or one.state.node != other.state.node
