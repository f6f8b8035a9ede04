"""How routers agree on a session's worker while Redis is away."""

from __future__ import annotations

from typing import ClassVar, Literal

from services.router.policies.base import Amount, Candidates, Factor, Filter, Pick
from services.router.snapshot import rendezvous


class HashSession(Filter):
    """While Redis is away, picks a candidate by the session's hash: the same one on every router."""

    type: Literal["hash_session"] = "hash_session"
    factor: Factor = 1.25
    """A candidate may cost this many times the cheapest one, ..."""
    ms: Amount = 50.0
    """... and this much beyond that."""

    uses_costs: ClassVar[bool] = True

    def narrow(self, candidates: Candidates) -> Pick | None:
        """The worker with the highest hash; None while bindings are known."""
        query = candidates.query
        if not query.session_key or query.bindings_known:
            return None
        near = (candidates.costs <= self.factor * candidates.cheapest() + self.ms).nonzero()[0]
        scores = rendezvous(candidates.snapshot.identities[near], query.session_key)
        return Pick(int(near[scores.argmax()]), "session hashed")
