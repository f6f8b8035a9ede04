"""Factors of adapters on a CPU, for our kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from services.compute.backends.batch import AdapterRows
from services.compute.kernels.bfloat16 import Bfloat16Kernels


class KernelLowRank:
    """The factors of all slots at fixed addresses, so that a captured step finds those of any adapter.

    Memory of a slot is used from the first adapter on, and only as much as the largest rank so far needs.
    """

    def __init__(self, kernels: Bfloat16Kernels, n_out: int, n_in: int, slots: int, max_rank: int) -> None:
        self._kernels = kernels
        self._a = torch.empty(slots, max_rank, n_in, dtype=torch.bfloat16)
        self._b = torch.empty(slots, max_rank, n_out, dtype=torch.bfloat16)  # transposed, to add whole rows
        self._ranks = torch.zeros(slots, dtype=torch.int64)

    def put(self, slot: int, a: Tensor, b: Tensor) -> None:
        """Set the factors of `slot`: `a` [rank, n_in], `b` [n_out, rank]."""
        rank = len(a)
        self._a[slot, :rank], self._b[slot, :rank], self._ranks[slot] = a, b.t(), rank

    def clear(self, slot: int) -> None:
        """Remove the factors of `slot`."""
        self._ranks[slot] = 0

    def add_(self, y: Tensor, x: Tensor, adapters: AdapterRows) -> None:
        """Add the product with each row of `x` and its slot's factors to `y`."""
        self._kernels.low_rank_(y, x, self._a, self._b, self._ranks, adapters.slots)
