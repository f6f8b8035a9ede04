"""Mean-pooled embeddings of prompts that may be computed in several chunks."""

from __future__ import annotations

import torch
from torch import Tensor


class Pools:
    """A running sum of hidden states for each slot that is pooled."""

    def __init__(self) -> None:
        self._sums: dict[int, Tensor] = {}  # [hidden_size] float32
        self._counts: dict[int, int] = {}

    def admit(self, slot: int) -> None:
        """Begin a sum."""
        self._sums.pop(slot, None)
        self._counts[slot] = 0

    def release(self, slot: int) -> None:
        """Forget a slot, if it was pooled."""
        self._counts.pop(slot, None)
        self._sums.pop(slot, None)

    def any(self) -> bool:
        """Say whether any slot is pooled."""
        return bool(self._counts)

    def holds(self, slot: int) -> bool:
        """Say whether the slot is pooled."""
        return slot in self._counts

    def add(self, slot: int, start: int, hidden: Tensor) -> None:
        """Add the hidden states [n, hidden_size] of the positions from `start` on."""
        if start != self._counts[slot]:
            raise ValueError(
                f"slot {slot} is pooled: its chunk starts at {start} but {self._counts[slot]} positions were summed; "
                "pooled requests must compute every position once, without prefix hits"
            )
        total = hidden.float().sum(dim=0)
        self._sums[slot] = self._sums[slot] + total if slot in self._sums else total
        self._counts[slot] += hidden.shape[0]

    def result(self, slot: int) -> tuple[float, ...]:
        """Return the mean over the positions so far, scaled to length 1."""
        mean = self._sums[slot] / self._counts[slot]
        return tuple(torch.nn.functional.normalize(mean, dim=0).tolist())
