"""Sessions by rendezvous hashing: sticky without any shared state, blind to load."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from services.router.snapshot import Choice, Query, Snapshot, rendezvous


@dataclass(frozen=True)
class SessionHash:
    """For installations without Redis whose sessions are many and small."""

    uses_prefixes: ClassVar[bool] = False
    uses_sessions: ClassVar[bool] = False

    def choose(self, snapshot: Snapshot, query: Query, why_not: NDArray[np.uint8]) -> Choice | None:
        """The eligible worker with the session's highest score; without a session, the request's."""
        eligible = np.flatnonzero(why_not == 0)
        if not len(eligible):
            return None
        scores = rendezvous(snapshot.identities[eligible], query.session_key or query.request_key)
        return Choice(int(eligible[scores.argmax()]), "session hashed" if query.session_key else "request hashed")
