"""Factors of adapters on a GPU, at fixed addresses that are taken when the model is loaded."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from services.compute.backends.batch import AdapterRows

_TILE_RANKS, _TILE_INS, _TILE_OUTS = 16, 128, 128


class CudaLowRank:
    """The factors of all slots, multiplied by torch: by slots, which the host knows."""

    def __init__(
        self, n_out: int, n_in: int, slots: int, max_rank: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.a = torch.zeros(slots, max_rank, n_in, dtype=dtype, device=device)
        self.b = torch.zeros(slots, max_rank, n_out, dtype=dtype, device=device)  # transposed, to add whole rows
        self.ranks = torch.zeros(slots, dtype=torch.int64, device=device)
        self._ranks = [0] * slots  # the same for the host

    def put(self, slot: int, a: Tensor, b: Tensor) -> None:
        """Set the factors of `slot`: `a` [rank, n_in], `b` [n_out, rank]."""
        rank = len(a)
        self.a[slot, :rank].copy_(a)
        self.b[slot, :rank].copy_(b.t())
        self._set_rank(slot, rank)

    def clear(self, slot: int) -> None:
        """Remove the factors of `slot`."""
        self._set_rank(slot, 0)

    def add_(self, y: Tensor, x: Tensor, adapters: AdapterRows) -> None:
        """Add the product with each row of `x` and its slot's factors to `y`."""
        for slot, rows in adapters.by_slot:
            if rank := self._ranks[slot]:
                inner = x.index_select(0, rows) @ self.a[slot, :rank].t()
                y.index_add_(0, rows, inner @ self.b[slot, :rank])

    def _set_rank(self, slot: int, rank: int) -> None:
        self._ranks[slot] = rank
        self.ranks[slot].fill_(rank)


class TritonLowRank(CudaLowRank):
    """The same by two launches, whatever the slots; the host need not know them."""

    def __init__(
        self, kernels: Any, n_out: int, n_in: int, slots: int, max_rank: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(n_out, n_in, slots, max_rank, dtype, device)
        self._kernels = kernels

    def add_(self, y: Tensor, x: Tensor, adapters: AdapterRows) -> None:
        """Add the product with each row of `x` and its slot's factors to `y`."""
        n, (_, max_rank, n_in), n_out = len(x), self.a.shape, self.b.shape[2]
        if not n:
            return
        x = x if x.stride(1) == 1 else x.contiguous()
        inner = torch.empty(n, max_rank, dtype=torch.float32, device=x.device)
        self._kernels.shrink[(n, -(-max_rank // _TILE_RANKS))](
            x,
            x.stride(0),
            self.a,
            self.ranks,
            adapters.slots,
            inner,
            n_in=n_in,
            max_rank=max_rank,
            tile_ranks=_TILE_RANKS,
            tile_ins=_TILE_INS,
            num_warps=4,
        )
        self._kernels.expand[(n, -(-n_out // _TILE_OUTS))](
            inner,
            self.b,
            self.ranks,
            adapters.slots,
            y,
            y.stride(0),
            n_out,
            max_rank=max_rank,
            tile_ranks=_TILE_RANKS,
            tile_outs=_TILE_OUTS,
            num_warps=4,
        )
