"""The candidate with the highest hash."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from services.router.policies.base import Candidates, Pick, Picker
from services.router.snapshot import rendezvous


class Rendezvous(Picker):
    """The highest hash of worker and session, or worker and request: the same on every router, regardless of cost."""

    type: Literal["rendezvous"] = "rendezvous"
    by: Literal["session", "request"] = "session"
    """The hashed name; requests without a session are hashed by their own id."""
    reason: Annotated[str, Field(max_length=40)] = ""
    """The reason in `Explain` and metrics, instead of "session hashed" or "request hashed"."""

    def pick(self, candidates: Candidates) -> Pick:
        """The worker with the highest score."""
        query, left = candidates.query, candidates.indices()
        session = query.session_key if self.by == "session" else 0
        scores = rendezvous(candidates.snapshot.identities[left], session or query.request_key)
        reason = self.reason or ("session hashed" if session else "request hashed")
        return Pick(int(left[scores.argmax()]), reason)
