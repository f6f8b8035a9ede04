"""A random candidate, the cheaper the likelier."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field

from services.router.policies.base import Candidates, Pick, Picker


class Softmax(Picker):
    """Random by the request, with odds that fall by a factor of e with every `temperature_ms` of cost."""

    type: Literal["softmax"] = "softmax"
    temperature_ms: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    """The higher, the more evenly requests spread and the less costs matter."""

    uses_costs: ClassVar[bool] = True

    def pick(self, candidates: Candidates) -> Pick:
        """The worker whose part of the unit interval holds the request's point."""
        left = candidates.indices()
        costs = candidates.costs[left]
        parts = np.cumsum(np.exp((costs.min() - costs) / self.temperature_ms))
        point = candidates.query.request_key / 2.0**64 * parts[-1]
        place = min(int(np.searchsorted(parts, point, side="right")), len(left) - 1)
        return Pick(int(left[place]), "by its odds")
