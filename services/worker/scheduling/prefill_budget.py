"""Budget of prefill rows in a step that also decodes; it bounds the time between tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass

_LEAST_ROWS = 16  # minimum per step, so that a long prompt progresses even where its keys are expensive


@dataclass(frozen=True, slots=True)
class PrefillBudget:
    """A budget in rows at the beginning of a prompt. A later row costs more, by the keys that it attends to."""

    n_rows: int
    key_cost: float = 0.0  # cost of a key; a row without keys costs 1

    def cost(self, start: int, n_rows: int) -> float:
        """Cost of `n_rows` rows from position `start` on."""
        return n_rows * (1.0 + self.key_cost * (start + n_rows / 2))

    def rows(self, start: int, budget: float) -> int:
        """Number of rows from position `start` on that `budget` pays for; at least min(_LEAST_ROWS, budget) and 1."""
        if not self.key_cost:
            return max(1, int(budget))
        # budget = n (1 + key_cost start) + n^2 key_cost / 2
        first = 1.0 + self.key_cost * start
        paid = (math.sqrt(first * first + 2.0 * self.key_cost * budget) - first) / self.key_cost
        return max(1, min(_LEAST_ROWS, int(budget)), int(paid))
