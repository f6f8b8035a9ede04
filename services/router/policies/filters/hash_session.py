"""How routers agree on a session's worker while nobody can tell its binding."""

from __future__ import annotations

from typing import ClassVar, Literal

from services.router.policies.base import Amount, Candidates, Factor, Filter, Pick
from services.router.snapshot import rendezvous


class HashSession(Filter):
    """While Redis is away, leaves the candidate that the session's hash gives, on every router the same."""

    type: Literal["hash_session"] = "hash_session"
    factor: Factor = 1.25
    """Only candidates count that cost at most this many times the cheapest one, ..."""
    ms: Amount = 50.0
    """... and this much beyond that."""

    uses_costs: ClassVar[bool] = True

    def narrow(self, candidates: Candidates) -> Pick | None:
        """That worker; nothing to say while bindings are known."""
        query = candidates.query
        if not query.session_key or query.bindings_known:
            return None
        near = (candidates.costs <= self.factor * candidates.cheapest() + self.ms).nonzero()[0]
        scores = rendezvous(candidates.snapshot.identities[near], query.session_key)
        return Pick(int(near[scores.argmax()]), "session hashed")
