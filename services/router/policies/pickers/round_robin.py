"""Every candidate in turn."""

from __future__ import annotations

from typing import Literal

import numpy as np

from services.router.policies.base import Candidates, Pick, Picker

# Multiples of the golden ratio, modulo 1, fill the unit interval evenly from the first few on.
_GOLDEN = 0.6180339887498949


class RoundRobin(Picker):
    """Every candidate in turn, regardless of cost."""

    type: Literal["turn"] = "turn"

    def pick(self, candidates: Candidates) -> Pick:
        """Return the next worker in order."""
        left = candidates.indices()
        return Pick(int(left[candidates.query.turn % len(left)]), "its turn")


class WeightedRoundRobin(Picker):
    """Candidates in turn, weighted by their measured prefill rates."""

    type: Literal["weighted_turn"] = "weighted_turn"

    def pick(self, candidates: Candidates) -> Pick:
        """The worker whose share of the unit interval contains this turn's point."""
        left = candidates.indices()
        shares = np.cumsum(candidates.snapshot.speeds.prefill_rate[left])
        point = (candidates.query.turn * _GOLDEN) % 1.0 * shares[-1]
        place = min(int(np.searchsorted(shares, point, side="right")), len(left) - 1)
        return Pick(int(left[place]), "its weighted turn")
