"""A session stays with its worker while that is bearable and the worker has had no more than its share."""

from __future__ import annotations

from typing import ClassVar, Literal

from services.router.estimates import expected_output
from services.router.policies.base import Amount, Candidates, Factor, Filter, Pick
from services.router.snapshot import Query, Snapshot, matched_at


class KeepSession(Filter):
    """Leaves a session's worker only, as long as it may stay there.

    The limits are wide, since costs swing with every prompt that arrives somewhere, and who moves has to be computed
    again: a queue makes sessions move, and moves make queues.
    """

    type: Literal["keep_session"] = "keep_session"
    factor: Factor = 2.0
    """Its worker may cost this many times the cheapest one, ..."""
    ms: Amount = 100.0
    """... and this much beyond that."""
    fair_share: Amount = 1.05
    """A worker that has had more than this share of the recent work, ..."""
    fair_requests: Amount = 4.0
    """... and as many such requests more than its share, gives sessions away."""

    uses_sessions: ClassVar[bool] = True
    uses_costs: ClassVar[bool] = True

    def narrow(self, candidates: Candidates) -> Pick | None:
        """The session's worker, or nothing to say."""
        query, costs = candidates.query, candidates.costs
        if not (query.session_key and query.bindings_known) or query.bound < 0:
            return None
        if costs[query.bound] - _kept_ms(candidates.snapshot, query) > self.factor * candidates.cheapest() + self.ms:
            return None
        if self._too_much(candidates):
            candidates.departure = "session evened out"
            return None
        return Pick(query.bound, "session kept")

    def _too_much(self, candidates: Candidates) -> bool:
        """Whether the bound worker has had clearly more than its share: by more than a few requests like this one.

        And has more now: what it has had weighs for half a minute, and all its sessions would leave it meanwhile.
        """
        snapshot, query = candidates.snapshot, candidates.query
        if not snapshot.busy or snapshot.share[query.bound] <= self.fair_share or snapshot.load_share[query.bound] <= 1:
            return False
        own = query.prompt_tokens - matched_at(query, query.bound) + candidates.decode_weight * expected_output(query)
        return bool(snapshot.excess[query.bound] > self.fair_requests * own)


def _kept_ms(snapshot: Snapshot, query: Query) -> float:
    """What a session leaves behind by moving that the costs do not know of.

    When nobody could say what is cached where, its worker is taken to have all of its prompt.
    """
    if query.matched_tokens is not None:
        return 0.0
    return float(query.prompt_tokens * snapshot.speeds.token_ms[query.bound])
