"""How many requests a worker has."""

from __future__ import annotations

from typing import Literal

from services.router.policies.base import Scorer
from services.router.snapshot import Estimates, Floats, Query, Snapshot


class Load(Scorer):
    """Requests that run or wait at the worker, or are on their way to it."""

    type: Literal["load"] = "load"

    def score(self, snapshot: Snapshot, query: Query, estimates: Estimates) -> Floats:
        """Counted regardless of length."""
        return snapshot.load
