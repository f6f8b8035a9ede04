"""The experts of a mixture by one Triton product for all of them: each reads its weights once, for its own rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from services.compute.backends.base import Elementwise
from services.compute.backends.shapes import ExpertsShape
from services.compute.backends.torch.experts import ExpertStack, Router, weighted_sum

_TILE_OUTS, _TILE_INS = 64, 64
_FEW, _MANY = 16, 64  # rows of a tile
_FULL = 32  # rows of an expert, on average, from which on large tiles are filled


class GroupedExperts:
    """Rows are sorted by expert on the device; the host reads nothing, whatever the number of rows."""

    def __init__(
        self, kernels: Any, stack: ExpertStack, shape: ExpertsShape, router: Router, gate: Elementwise
    ) -> None:
        """`stack`: the experts of `shape`."""
        self._kernels, self._stack, self._shape, self._route, self._gate = kernels, stack, shape, router, gate
        self._bounds = torch.arange(len(shape.numbers) + 1, device=stack.down.device)

    def __call__(self, x: Tensor, logits: Tensor) -> Tensor:
        """Return this rank's summand of [n, hidden_size]."""
        weights, chosen = self._route(logits)
        (n, n_active), numbers = chosen.shape, self._shape.numbers
        own = chosen.view(-1) - numbers.start
        own = own.masked_fill((own < 0) | (own >= len(numbers)), len(numbers))  # another rank's come last
        in_order, order = torch.sort(own, stable=True)
        starts = torch.searchsorted(in_order, self._bounds)
        x = x.contiguous()
        if self._shape.routing.on_inputs:
            x = x.index_select(0, order // n_active) * weights.view(-1, 1).index_select(0, order).to(x.dtype)
        stack, gathers = self._stack, not self._shape.routing.on_inputs
        hidden = x.new_empty(n * n_active, stack.gate_up.shape[1])
        self._multiply(x, stack.gate_up, stack.gate_up_bias, hidden, order, starts, n_active, gathers=gathers)
        terms = x.new_zeros(n * n_active, stack.down.shape[1])
        self._multiply(self._gate(hidden), stack.down, stack.down_bias, terms, order, starts, n_active, scatters=True)
        return weighted_sum(terms.view(n, n_active, -1), weights, self._shape.routing)

    def _multiply(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        out: Tensor,
        order: Tensor,
        starts: Tensor,
        n_active: int,
        *,
        gathers: bool = False,
        scatters: bool = False,
    ) -> None:
        """Write the products of the sorted rows and their experts' `weight` [n_experts, n_out, n_in] to `out`."""
        n_experts, n_out, n_in = weight.shape
        tile_rows = _MANY if len(order) >= _FULL * n_experts else _FEW
        most_tiles = min(len(order), n_experts) + len(order) // tile_rows
        if not most_tiles:
            return
        self._kernels.product[(most_tiles, -(-n_out // _TILE_OUTS))](
            x,
            order,
            starts,
            weight,
            weight if bias is None else bias,
            out,
            n_active,
            n_out,
            n_in=n_in,
            n_experts=n_experts,
            n_bounds=1 << max(1, n_experts - 1).bit_length(),
            gathers=gathers,
            scatters=scatters,
            has_bias=bias is not None,
            tile_rows=tile_rows,
            tile_outs=_TILE_OUTS,
            tile_ins=_TILE_INS,
            num_warps=4,
            num_stages=3,
        )
