"""Workers of a busy fleet that have room."""

from __future__ import annotations

from typing import Literal

from services.router.policies.base import Candidates, Filter, Mask


class Spare(Filter):
    """Keeps workers with less than their share of the requests now; keeps all while the fleet is not busy."""

    type: Literal["spare"] = "spare"

    def narrow(self, candidates: Candidates) -> Mask | None:
        """The workers below their share."""
        snapshot = candidates.snapshot
        return snapshot.load_share < 1.0 if snapshot.busy else None
