"""A random candidate; cheaper ones are likelier."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field

from services.router.policies.base import Candidates, Pick, Picker


class Softmax(Picker):
    """A random candidate; odds fall by a factor of e with every `temperature_ms` of cost."""

    type: Literal["softmax"] = "softmax"
    temperature_ms: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    """A higher value spreads requests more evenly, and makes costs matter less."""

    uses_costs: ClassVar[bool] = True

    def pick(self, candidates: Candidates) -> Pick:
        """The worker whose part of the unit interval contains the request's point, a hash of its id."""
        left = candidates.indices()
        costs = candidates.costs[left]
        parts = np.cumsum(np.exp((costs.min() - costs) / self.temperature_ms))
        point = candidates.query.request_key / 2.0**64 * parts[-1]
        place = min(int(np.searchsorted(parts, point, side="right")), len(left) - 1)
        return Pick(int(left[place]), "by its odds")
