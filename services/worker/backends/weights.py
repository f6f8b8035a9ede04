"""A weight as a value: it keeps the form in which its numbers are stored until a device packs it.

There are three forms. A device packs a form that its kernels multiply with in that form; for the others it calls `rows`
of one weight, or `dense` or `dense_blocks` of several, to get the numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

_BAND = 1024  # rows copied at a time, to bound the memory beside the result
_FP8 = torch.float8_e4m3fn


@dataclass(frozen=True, slots=True)
class Dense:
    """Numbers of any float dtype; a view of the mapped file if they come from a file."""

    values: Tensor  # [n_out, n_in]

    @property
    def shape(self) -> tuple[int, int]:
        """Return (n_out, n_in)."""
        return self.values.shape[0], self.values.shape[1]

    def rows(self, start: int, stop: int) -> Tensor:
        """Return the stored numbers of rows [start, stop)."""
        return self.values[start:stop]

    def take(self, rows: Tensor) -> Dense:
        """Return the weight of the rows with the numbers `rows` [n]."""
        return Dense(self.values.index_select(0, rows))

    def ends(self) -> tuple[float, float]:
        """Return the smallest and the largest number; NaN if a number is NaN."""
        return _ends(self.values)


@dataclass(frozen=True, slots=True)
class Grouped:
    """Numbers (code - zero) * scale + offset, all but the code for each group of inputs of an output."""

    codes: Tensor  # [n_out, n_in] uint8; or int8 or float8, without zeros
    scale: Tensor  # [n_out, n_groups], of any float dtype
    zero: Tensor | None  # [n_out, n_groups] uint8
    groups: Tensor  # [n_in] int64, the group of each input
    offset: Tensor | None = None  # [n_out, n_groups], of any float dtype

    @property
    def shape(self) -> tuple[int, int]:
        """Return (n_out, n_in)."""
        return self.codes.shape[0], self.codes.shape[1]

    def rows(self, start: int, stop: int) -> Tensor:
        """Return the numbers of rows [start, stop) in float32."""
        numbers = self.codes[start:stop].float()
        if self.zero is not None:
            numbers -= self._of_inputs(self.zero[start:stop])
        numbers *= self._of_inputs(self.scale[start:stop])
        if self.offset is not None:
            numbers += self._of_inputs(self.offset[start:stop])
        return numbers

    def take(self, rows: Tensor) -> Grouped:
        """Return the weight of the rows with the numbers `rows` [n]."""
        zero, offset = (None if kept is None else kept.index_select(0, rows) for kept in (self.zero, self.offset))
        return Grouped(self.codes.index_select(0, rows), self.scale.index_select(0, rows), zero, self.groups, offset)

    def ends(self) -> tuple[float, float]:
        """Return bounds of the numbers for all combinations of codes and scales; NaN if a number is NaN."""
        if not self.codes.numel():
            return 0.0, 0.0
        zero = 0.0 if self.zero is None else self.zero.float()
        offset = 0.0 if self.offset is None else self.offset.float()
        return _ends((_code_ends(self.codes).view(2, 1, 1) - zero) * self.scale.float() + offset)

    def _of_inputs(self, per_group: Tensor) -> Tensor:
        """Expand [n, n_groups] to [n, n_in], or to [n, 1] if there is one group."""
        return per_group if per_group.shape[1] == 1 else per_group.index_select(1, self.groups)


@dataclass(frozen=True, slots=True)
class PerChannel:
    """Numbers code * scale, with a scale for each output."""

    codes: Tensor  # [n_out, n_in] int8 or float8
    scale: Tensor  # [n_out, 1], of any float dtype

    @property
    def shape(self) -> tuple[int, int]:
        """Return (n_out, n_in)."""
        return self.codes.shape[0], self.codes.shape[1]

    def rows(self, start: int, stop: int) -> Tensor:
        """Return the numbers of rows [start, stop) in float32."""
        numbers = self.codes[start:stop].float()
        numbers *= self.scale[start:stop]
        return numbers

    def take(self, rows: Tensor) -> PerChannel:
        """Return the weight of the rows with the numbers `rows` [n]."""
        return PerChannel(self.codes.index_select(0, rows), self.scale.index_select(0, rows))

    def ends(self) -> tuple[float, float]:
        """Return bounds of the numbers; NaN if a number is NaN."""
        if not self.codes.numel():
            return 0.0, 0.0
        return _ends(_code_ends(self.codes).view(2, 1, 1) * self.scale.float())


Weight = Dense | Grouped | PerChannel


@dataclass(frozen=True, slots=True)
class Stacked:
    """Weights concatenated along n_out, each in its own form; one product multiplies all of them."""

    parts: tuple[Weight, ...]  # with the same n_in

    @property
    def shape(self) -> tuple[int, int]:
        """Return (n_out, n_in)."""
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]

    def dense(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return all numbers, each rounded once, as a new tensor."""
        weight, start = torch.empty(self.shape, dtype=dtype, device=device), 0
        for part in self.parts:
            for low in range(0, part.shape[0], _BAND):
                band = part.rows(low, low + _BAND)
                weight[start : start + len(band)].copy_(band)
                start += len(band)
        return weight

    def dense_blocks(self, height: int, dtype: torch.dtype) -> Iterator[Tensor]:
        """Yield the numbers in blocks of `height` rows; the last block may have fewer.

        Each block is contiguous, and a view if possible, so that loading needs the memory of one block beside the
        packed weight, not of a second weight.
        """
        n_out = self.shape[0]
        for start in range(0, n_out, height):
            yield self._rows(start, min(start + height, n_out)).to(dtype).contiguous()

    def _rows(self, start: int, stop: int) -> Tensor:
        found, first = [], 0
        for part in self.parts:
            n_out = part.shape[0]
            low, high = max(start - first, 0), min(stop - first, n_out)
            if low < high:
                found.append(part.rows(low, high))
            first += n_out
        return found[0] if len(found) == 1 else torch.cat(found)


def _ends(numbers: Tensor) -> tuple[float, float]:
    if not numbers.numel():
        return 0.0, 0.0
    low, high = torch.aminmax(numbers)
    return float(low), float(high)


def _code_ends(codes: Tensor) -> Tensor:
    """Return the smallest and the largest code, or bounds of them: [2] float32."""
    if codes.dtype is not _FP8:
        return torch.stack(torch.aminmax(codes)).float()
    largest = (codes.view(torch.uint8) & 0x7F).max().view(_FP8).float()  # unsigned codes have the order of values
    return torch.stack((-largest, largest))
