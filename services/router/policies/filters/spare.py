"""Workers with room, of a busy fleet."""

from __future__ import annotations

from typing import Literal

from services.router.policies.base import Candidates, Filter, Mask


class Spare(Filter):
    """Leaves whoever has less than its share of the requests now; a fleet that is not busy passes."""

    type: Literal["spare"] = "spare"

    def narrow(self, candidates: Candidates) -> Mask | None:
        """Those below their share."""
        snapshot = candidates.snapshot
        return snapshot.load_share < 1.0 if snapshot.busy else None
