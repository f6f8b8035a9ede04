"""What prompts may add to a step of decodes, so that streams keep their pace."""

from __future__ import annotations

import math
from dataclasses import dataclass

_LEAST_ROWS = 16  # deep in a long prompt: it gets on however slowly streams would have to go for it


@dataclass(frozen=True, slots=True)
class PrefillBudget:
    """A budget in rows at the beginning of a prompt. Further on a row costs more, by the keys it attends to."""

    n_rows: int
    key_cost: float = 0.0  # of a key, where a row by itself costs 1

    def cost(self, start: int, n_rows: int) -> float:
        """Of that many rows from position `start` on."""
        return n_rows * (1.0 + self.key_cost * (start + n_rows / 2))

    def rows(self, start: int, budget: float) -> int:
        """How many rows from position `start` on the budget pays for; at least a few of it, and one."""
        if not self.key_cost:
            return max(1, int(budget))
        # budget = n (1 + key_cost start) + n^2 key_cost / 2
        first = 1.0 + self.key_cost * start
        paid = (math.sqrt(first * first + 2.0 * self.key_cost * budget) - first) / self.key_cost
        return max(1, min(_LEAST_ROWS, int(budget)), int(paid))
