"""A fixed cost for moving a session."""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np

from services.router.policies.base import Scorer
from services.router.snapshot import Estimates, Floats, Query, Snapshot


class Session(Scorer):
    """0 for the session's worker, 1 for all others; 0 for all workers if the request has no bound session."""

    type: Literal["session"] = "session"

    uses_sessions: ClassVar[bool] = True

    def score(self, snapshot: Snapshot, query: Query, estimates: Estimates) -> Floats:
        """From the binding in Redis."""
        if not query.session_key or query.bound < 0:
            return np.zeros(len(snapshot.worker_ids))
        others = np.ones(len(snapshot.worker_ids))
        others[query.bound] = 0.0
        return others
