"""Rounds weights to the levels of a scheme."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from services.tools.quantizer.scheme import Scheme

_SHRINKS = tuple(1 - 0.05 * step for step in range(10))  # shares of a group's range, tried by :func:`search_grid`


@dataclass(frozen=True, slots=True)
class QuantizationGrid:
    """The levels of a weight [n_out, n_in], for each group of inputs of an output."""

    scheme: Scheme
    scale: Tensor  # [n_out, n_groups], rounded to the dtype in which it is stored
    zero: Tensor  # [n_out, n_groups] float32, whole numbers from 0 to scheme.levels

    def round(self, weight: Tensor) -> Tensor:
        """Return the codes [n_out, n_in] uint8 of the levels nearest to `weight` [n_out, n_in]."""
        groups = self._grouped(weight)
        codes = (groups / self.scale.float().unsqueeze(-1)).round_() + self.zero.unsqueeze(-1)
        return codes.clamp_(0, self.scheme.levels).to(torch.uint8).view(weight.shape)

    def numbers(self, codes: Tensor) -> Tensor:
        """Return the numbers [n_out, n_in] float32 of `codes` [n_out, n_in]."""
        groups = self._grouped(codes).float() - self.zero.unsqueeze(-1)
        return (groups * self.scale.float().unsqueeze(-1)).view(codes.shape)

    def columns(self, places: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scale and the zero of each of the inputs `places` [n]: two of [n_out, n] float32."""
        n_groups = self.scale.shape[1]
        group = places // self.scheme.group if self.scheme.group else places.new_zeros(len(places))
        assert int(group.max()) < n_groups
        return self.scale.float().index_select(1, group), self.zero.index_select(1, group)

    def _grouped(self, values: Tensor) -> Tensor:
        return values.view(values.shape[0], self.scale.shape[1], -1)


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A quantized weight."""

    codes: Tensor  # [n_out, n_in] uint8
    grid: QuantizationGrid

    def numbers(self) -> Tensor:
        """Return the numbers [n_out, n_in] float32."""
        return self.grid.numbers(self.codes)

    def rows(self, start: int, stop: int) -> QuantizedWeight:
        """Return the rows [start, stop)."""
        grid = QuantizationGrid(self.grid.scheme, self.grid.scale[start:stop], self.grid.zero[start:stop])
        return QuantizedWeight(self.codes[start:stop], grid)


def range_grid(weight: Tensor, scheme: Scheme, dtype: torch.dtype, shrink: float = 1.0) -> QuantizationGrid:
    """Return the grid whose levels span each group of `weight` [n_out, n_in], or `shrink` of that range.

    `dtype` is that of stored scales. 0 is always a level.
    """
    groups = weight.view(weight.shape[0], -1, scheme.group or weight.shape[1])
    low, high = (end * shrink for end in torch.aminmax(groups, dim=-1))
    low, high = low.clamp(max=0), high.clamp(min=0)
    if scheme.symmetric:
        high = torch.maximum(-low, high)
        low = -high
    scale = ((high - low) / scheme.levels).clamp(min=torch.finfo(dtype).tiny).to(dtype)
    zero = torch.full_like(low, scheme.middle)
    if not scheme.symmetric:
        zero = (-low / scale.float()).round().clamp(0, scheme.levels)
    return QuantizationGrid(scheme, scale, zero)


def search_grid(weight: Tensor, scheme: Scheme, dtype: torch.dtype, importance: Tensor) -> QuantizationGrid:
    """Return the grid with the smallest rounding error of each group, among several parts of its range.

    `importance` [n_in] weighs the squared errors of the inputs.
    """
    best, best_error = range_grid(weight, scheme, dtype), None
    for shrink in _SHRINKS:
        grid = range_grid(weight, scheme, dtype, shrink)
        squares = (grid.numbers(grid.round(weight)) - weight).square_() * importance
        error = squares.view(*grid.scale.shape, -1).sum(dim=-1)  # [n_out, n_groups]
        if best_error is None:
            best_error = error
            continue
        better = error < best_error
        best_error = torch.where(better, error, best_error)
        scale, zero = (torch.where(better, new, old) for new, old in ((grid.scale, best.scale), (grid.zero, best.zero)))
        best = QuantizationGrid(scheme, scale, zero)
    return best
