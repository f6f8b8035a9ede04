"""Consistent hashing with bounded loads."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np

from services.router.policies.base import Candidates, Factor, Filter, Mask


class Bounded(Filter):
    """Keeps workers below a bound of requests; before `rendezvous`: consistent hashing with bounded loads.

    A session whose worker is full goes to the next worker by its hash, the same one on every router, and returns when
    its worker has room. No worker takes more than the bound (Mirrokni, Thorup and Zadimoghaddam, 2018).
    """

    type: Literal["bounded"] = "bounded"
    factor: Factor = 1.25
    """A worker may have this many times the mean, rounded up; the mean counts the new request."""

    def narrow(self, candidates: Candidates) -> Mask:
        """The workers below the bound; the least loaded one always is."""
        load = candidates.snapshot.load
        among = load if candidates.left is None else load[candidates.left]
        bound = math.ceil(self.factor * (float(np.add.reduce(among)) + 1) / len(among))
        below: Mask = load < bound
        return below
