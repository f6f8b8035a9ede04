"""The share of recent work."""

from __future__ import annotations

from typing import Literal

from services.router.policies.base import Scorer
from services.router.snapshot import Estimates, Floats, Query, Snapshot


class Work(Scorer):
    """The worker's share of the recent work; 1 is fair. All have 1 while the fleet is not busy."""

    type: Literal["work"] = "work"

    def score(self, snapshot: Snapshot, query: Query, estimates: Estimates) -> Floats:
        """Relative to the mean of the eligible workers, corrected for their speeds."""
        return snapshot.share
