"""The worker with the fewest requests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from services.router.snapshot import Choice, Query, Snapshot, rendezvous


@dataclass(frozen=True)
class LeastLoaded:
    """For equal workers and requests of very different length."""

    uses_prefixes: ClassVar[bool] = False
    uses_sessions: ClassVar[bool] = False

    def choose(self, snapshot: Snapshot, query: Query, why_not: NDArray[np.uint8]) -> Choice | None:
        """Fewest requests, then fewest queued tokens, then least recent work, then a hash of worker and request."""
        eligible = np.flatnonzero(why_not == 0)
        if not len(eligible):
            return None
        for column in (snapshot.load, snapshot.queued_tokens, snapshot.share):
            values = column[eligible]
            eligible = eligible[values == values.min()]
        scores = rendezvous(snapshot.identities[eligible], query.request_key)
        return Choice(int(eligible[scores.argmax()]), "least loaded")
