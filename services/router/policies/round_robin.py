"""Every eligible worker in turn, whatever it holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from services.router.snapshot import Choice, Query, Snapshot


@dataclass(frozen=True)
class RoundRobin:
    """For workers that are equal and requests that are alike."""

    uses_prefixes: ClassVar[bool] = False
    uses_sessions: ClassVar[bool] = False

    def choose(self, snapshot: Snapshot, query: Query, why_not: NDArray[np.uint8]) -> Choice | None:
        """The worker whose turn it is."""
        eligible = np.flatnonzero(why_not == 0)
        if not len(eligible):
            return None
        return Choice(int(eligible[query.turn % len(eligible)]), "its turn")
