"""Workers in turn, each as often as it is fast."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from services.router.snapshot import Choice, Query, Snapshot

# Multiples of the golden ratio, modulo 1, fill the unit interval evenly from the first few on.
_GOLDEN = 0.6180339887498949


@dataclass(frozen=True)
class Weighted:
    """For fleets of unequal devices: the weight is the measured prefill rate."""

    uses_prefixes: ClassVar[bool] = False
    uses_sessions: ClassVar[bool] = False

    def choose(self, snapshot: Snapshot, query: Query, why_not: NDArray[np.uint8]) -> Choice | None:
        """The worker whose share of the unit interval contains this turn's point."""
        eligible = np.flatnonzero(why_not == 0)
        if not len(eligible):
            return None
        shares = np.cumsum(snapshot.speeds.prefill_rate[eligible])
        point = (query.turn * _GOLDEN) % 1.0 * shares[-1]
        place = min(int(np.searchsorted(shares, point, side="right")), len(eligible) - 1)
        return Choice(int(eligible[place]), "its weighted turn")
