"""How long the answer would take."""

from __future__ import annotations

from typing import Literal

from services.router.estimates import expected_output
from services.router.policies.base import Amount, Scorer
from services.router.snapshot import Estimates, Floats, Query, Snapshot


class DecodeTime(Scorer):
    """Milliseconds from the first token to the last, with the request added to the worker's batch."""

    type: Literal["decode_time"] = "decode_time"
    weight: Amount = 0.5
    """Below 1, since most answers end early."""

    def score(self, snapshot: Snapshot, query: Query, estimates: Estimates) -> Floats:
        """Milliseconds per token."""
        return estimates.itl_ms

    def scale(self, query: Query) -> float:
        """The expected number of tokens."""
        return expected_output(query)
