"""The workers with the least load."""

from __future__ import annotations

from typing import Literal

import numpy as np

from services.router.policies.base import Amount, Candidates, Filter, Mask
from services.router.snapshot import Floats, Snapshot


class Least(Filter):
    """Keeps the workers with the fewest requests, the fewest queued tokens or the least recent work."""

    type: Literal["least"] = "least"
    of: Literal["requests", "queued_tokens", "work"]
    """The compared number. Work is a share, 1 is fair; it is compared only while the fleet is busy."""
    within: Amount = 0.0
    """Also keeps workers with at most this much more than the least."""

    def narrow(self, candidates: Candidates) -> Mask | None:
        """The workers with the least."""
        snapshot = candidates.snapshot
        if self.of == "work" and not snapshot.busy:
            return None
        values = _values(snapshot, self.of)
        among = values if candidates.left is None else np.where(candidates.left, values, np.inf)
        mask: Mask = values <= among[among.argmin()] + self.within  # several times as fast as min()
        return mask


def _values(snapshot: Snapshot, of: str) -> Floats:
    match of:
        case "requests":
            return snapshot.load
        case "queued_tokens":
            return snapshot.queued_tokens
        case _:
            return snapshot.share
