"""Keeps a session at its worker, within limits of cost and of the worker's share of the work."""

from __future__ import annotations

from typing import ClassVar, Literal

from services.router.estimates import expected_output
from services.router.policies.base import Amount, Candidates, Factor, Filter, Pick
from services.router.snapshot import Query, Snapshot

KEPT = "session kept"


class KeepSession(Filter):
    """Picks the session's worker, as long as its cost and its share of the work allow.

    The limits are wide, because a session that moves has to be computed again: queues would make sessions move, and
    the moves would make new queues.
    """

    type: Literal["keep_session"] = "keep_session"
    factor: Factor = 2.0
    """Its worker may cost this many times the cheapest one, ..."""
    ms: Amount = 100.0
    """... and this much beyond that."""
    fair_share: Amount = 1.05
    """A worker gives sessions away if it has had more than this share of the recent work, ..."""
    fair_requests: Amount = 4.0
    """... by more than this many requests of the same size."""

    uses_sessions: ClassVar[bool] = True
    uses_costs: ClassVar[bool] = True

    def narrow(self, candidates: Candidates) -> Pick | None:
        """The session's worker; None if the session has none or leaves it."""
        query, costs = candidates.query, candidates.costs
        if not (query.session_key and query.bindings_known) or query.bound < 0:
            return None
        snapshot, bound, matched = candidates.snapshot, query.bound, query.matched_tokens
        if not self.bears(float(costs[bound]) - _kept_ms(snapshot, query), candidates.cheapest()):
            return None
        cached = 0.0 if matched is None else float(matched[bound])
        own = query.prompt_tokens - cached + candidates.decode_weight * expected_output(query)
        if self.too_much(snapshot, bound, own):
            candidates.departure = "session evened out"
            return None
        return Pick(bound, KEPT)

    def bears(self, cost_ms: float, cheapest_ms: float) -> bool:
        """Whether the session's worker is within the limits of cost, if the cheapest one costs as much."""
        return cost_ms <= self.factor * cheapest_ms + self.ms

    def too_much(self, snapshot: Snapshot, bound: int, own_tokens: float) -> bool:
        """Whether the bound worker has had more than its share of recent work, and has more than its share of load now.

        Both are needed: recent work decays slowly, and all sessions would leave the worker meanwhile. `own_tokens` is
        the work of the request.
        """
        if not snapshot.busy or snapshot.share[bound] <= self.fair_share or snapshot.load_share[bound] <= 1:
            return False
        return bool(snapshot.excess[bound] > self.fair_requests * own_tokens)


def _kept_ms(snapshot: Snapshot, query: Query) -> float:
    """Milliseconds that the session's cache saves at its worker, unless the costs include them already.

    When the coordinator did not answer, the worker is assumed to have the whole prompt cached.
    """
    if query.matched_tokens is not None:
        return 0.0
    return float(query.prompt_tokens * snapshot.speeds.token_ms[query.bound])
