"""A limit on the cost of evening work out."""

from __future__ import annotations

from typing import ClassVar, Literal

from services.router.policies.base import Amount, Candidates, Factor, Filter, Mask


class Affordable(Filter):
    """Keeps workers that cost little more than the cheapest one."""

    type: Literal["affordable"] = "affordable"
    factor: Factor = 1.25
    """A worker may cost this many times the cheapest one, ..."""
    ms: Amount = 50.0
    """... and this much beyond that."""

    uses_costs: ClassVar[bool] = True

    def narrow(self, candidates: Candidates) -> Mask:
        """The workers within the limit."""
        mask: Mask = candidates.costs <= self.factor * candidates.cheapest() + self.ms
        return mask
