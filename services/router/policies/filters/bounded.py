"""Workers that have room for one more."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np

from services.router.policies.base import Candidates, Factor, Filter, Mask


class Bounded(Filter):
    """Leaves whoever is below a bound of requests; before `rendezvous`: consistent hashing with bounded loads.

    A session whose worker is full goes to the next one of its hash, on every router the same, and comes back when there
    is room: no worker takes more than the bound, whoever is popular (Mirrokni, Thorup and Zadimoghaddam, 2018).
    """

    type: Literal["bounded"] = "bounded"
    factor: Factor = 1.25
    """A worker may have this many times the mean, rounded up, the request that is placed included."""

    def narrow(self, candidates: Candidates) -> Mask:
        """Those below the bound: at least who has the least."""
        load = candidates.snapshot.load
        among = load if candidates.left is None else load[candidates.left]
        bound = math.ceil(self.factor * (float(np.add.reduce(among)) + 1) / len(among))
        below: Mask = load < bound
        return below
