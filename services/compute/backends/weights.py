"""A weight as a value: it keeps the form in which its numbers are stored until a device packs it.

There are four stored forms, one of them in a file's own blocks, and one whose numbers are rounded while they are read.
A device packs a form that its kernels multiply with in that form; for the others it calls `rows` of one weight, or
`dense` or `dense_blocks` of several, to get the numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from services.compute.backends.mapped import MappedFile

_BAND = 1024  # rows copied at a time, to bound the memory besides the result
_FP8 = torch.float8_e4m3fn


@dataclass(frozen=True, slots=True)
class Dense:
    """Numbers of any float dtype; a view of the mapped file if they come from a file."""

    values: Tensor  # [n_out, n_in]

    @property
    def shape(self) -> tuple[int, int]:
        """Return (n_out, n_in)."""
        return self.values.shape[0], self.values.shape[1]

    @property
    def form(self) -> str:
        """The form in words."""
        return str(self.values.dtype).removeprefix("torch.")

    def rows(self, start: int, stop: int) -> Tensor:
        """Return the stored numbers of rows [start, stop)."""
        return self.values[start:stop]

    def band(self, start: int, stop: int) -> Dense:
        """Return the weight of the rows [start, stop), as a view."""
        return Dense(self.values[start:stop])

    def take(self, rows: Tensor) -> Dense:
        """Return the weight of the rows with the numbers `rows` [n]."""
        return Dense(self.values.index_select(0, rows))

    def ends(self) -> tuple[float, float]:
        """Return the smallest and the largest number; NaN if a number is NaN."""
        return _ends(torch.tensor([_ends(self.values[rows]) for rows in read_rows(self, _BAND)]))


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

    @property
    def form(self) -> str:
        """The form in words."""
        return f"{_name(self.codes)} in groups of {-(-self.shape[1] // self.scale.shape[1])}"

    def rows(self, start: int, stop: int) -> Tensor:
        """Return the numbers of rows [start, stop) in float32."""
        numbers = self.codes[start:stop].float()
        if self.zero is not None:
            numbers -= self._of_inputs(self.zero[start:stop])
        numbers *= self._of_inputs(self.scale[start:stop])
        if self.offset is not None:
            numbers += self._of_inputs(self.offset[start:stop])
        return numbers

    def band(self, start: int, stop: int) -> Grouped:
        """Return the weight of the rows [start, stop), as a view."""
        zero, offset = (None if part is None else part[start:stop] for part in (self.zero, self.offset))
        return Grouped(self.codes[start:stop], self.scale[start:stop], zero, self.groups, offset)

    def take(self, rows: Tensor) -> Grouped:
        """Return the weight of the rows with the numbers `rows` [n]."""
        zero, offset = (None if part is None else part.index_select(0, rows) for part in (self.zero, self.offset))
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


class BlockSplit(Protocol):
    """Takes rows of a file's blocks apart."""

    @property
    def n_codes(self) -> int:
        """Codes are uint8 below this number; 0: they are int8."""

    @property
    def groups(self) -> Tensor:
        """The group of each input: [n_in] int64."""

    def grouped(self, blocks: Tensor) -> Grouped:
        """Return the weight of rows of blocks, [n, blocks of a row, n_bytes] uint8."""

    def ends(self, blocks: Tensor) -> tuple[float, float]:
        """Return bounds of the numbers of such rows; NaN if a number is NaN."""


@dataclass(frozen=True, slots=True)
class InBlocks:
    """Numbers in a file's blocks, taken apart only while they are read: they need several times the room then."""

    blocks: Tensor  # [n_out, blocks of a row, n_bytes] uint8, a view of the mapped file
    split: BlockSplit

    @property
    def shape(self) -> tuple[int, int]:
        """Return (n_out, n_in)."""
        return len(self.blocks), len(self.split.groups)

    @property
    def form(self) -> str:
        """The form in words."""
        groups, n_codes = self.split.groups, self.split.n_codes
        name = f"uint{(n_codes - 1).bit_length()}" if n_codes else "int8"
        return f"{name} in groups of {int((groups == groups[len(groups) // 2]).sum())}"

    def rows(self, start: int, stop: int) -> Tensor:
        """Return the numbers of rows [start, stop) in float32."""
        return self.band(start, stop).rows(0, stop - start)

    def band(self, start: int, stop: int) -> Grouped:
        """Return the weight of the rows [start, stop)."""
        return self.split.grouped(self.blocks[start:stop])

    def take(self, rows: Tensor) -> InBlocks:
        """Return the weight of the rows with the numbers `rows` [n]."""
        return InBlocks(self.blocks.index_select(0, rows), self.split)

    def ends(self) -> tuple[float, float]:
        """Return bounds of the numbers for all combinations of codes and scales; NaN if a number is NaN."""
        return _ends(torch.tensor([self.split.ends(self.blocks[rows]) for rows in read_rows(self, _BAND)]))


@dataclass(frozen=True, slots=True)
class PerChannel:
    """Numbers code * scale, with a scale for each output."""

    codes: Tensor  # [n_out, n_in] int8 or float8
    scale: Tensor  # [n_out, 1], of any float dtype

    @property
    def shape(self) -> tuple[int, int]:
        """Return (n_out, n_in)."""
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def form(self) -> str:
        """The form in words."""
        return f"{_name(self.codes)} per output"

    def rows(self, start: int, stop: int) -> Tensor:
        """Return the numbers of rows [start, stop) in float32."""
        numbers = self.codes[start:stop].float()
        numbers *= self.scale[start:stop]
        return numbers

    def band(self, start: int, stop: int) -> PerChannel:
        """Return the weight of the rows [start, stop), as a view."""
        return PerChannel(self.codes[start:stop], self.scale[start:stop])

    def take(self, rows: Tensor) -> PerChannel:
        """Return the weight of the rows with the numbers `rows` [n]."""
        return PerChannel(self.codes.index_select(0, rows), self.scale.index_select(0, rows))

    def ends(self) -> tuple[float, float]:
        """Return bounds of the numbers; NaN if a number is NaN."""
        if not self.codes.numel():
            return 0.0, 0.0
        return _ends(_code_ends(self.codes).view(2, 1, 1) * self.scale.float())


@dataclass(frozen=True, slots=True)
class Rounded:
    """Columns of stored numbers, each rounded to the nearest of its group's codes when it is read.

    A group's scale is that of all its stored numbers, so that parts of a weight have the codes of the whole. The number
    farthest from 0 has the code -2^(bits - 1), by the sign of the scale, which is a float16 number.
    """

    values: Tensor  # [n_out, all inputs], finite; a view of the mapped file if they come from a file
    start: int  # the columns [start, stop) are the weight
    stop: int
    bits: Literal[4, 8]
    group: int  # stored inputs of a group

    @property
    def shape(self) -> tuple[int, int]:
        """Return (n_out, n_in)."""
        return self.values.shape[0], self.stop - self.start

    @property
    def form(self) -> str:
        """The form in words."""
        return f"int{self.bits} in groups of {self.group}"

    @property
    def groups(self) -> Tensor:
        """The group of each input, from 0 on: [n_in] int64."""
        return torch.arange(self.start, self.stop) // self.group - self.start // self.group

    def rows(self, start: int, stop: int) -> Tensor:
        """Return the rounded numbers of rows [start, stop) in float32."""
        return self.band(start, stop).rows(0, stop - start)

    def band(self, start: int, stop: int) -> Grouped:
        """Return the weight of the rows [start, stop)."""
        size = self.group
        low, high = self.start // size, -(-self.stop // size)  # groups
        numbers = self.values[start:stop, low * size : high * size].float()
        missing = (high - low) * size - numbers.shape[1]
        cells = F.pad(numbers, (0, missing)).view(len(numbers), high - low, size)
        center = 1 << (self.bits - 1)
        low_end, high_end = torch.aminmax(cells, dim=-1)
        scale = _half(torch.where(high_end > -low_end, high_end, low_end) / -center)
        inverse = torch.where(scale != 0, 1 / scale.float(), 0.0).unsqueeze(-1)
        codes = (cells * inverse).round_().clamp_(-center, center - 1).view(len(numbers), -1)
        codes = codes[:, self.start - low * size : self.stop - low * size]
        zero = torch.full(scale.shape, center, dtype=torch.uint8)
        return Grouped((codes + center).to(torch.uint8), scale, zero, self.groups)

    def take(self, rows: Tensor) -> Rounded:
        """Return the weight of the rows with the numbers `rows` [n]."""
        return replace(self, values=self.values.index_select(0, rows))

    def ends(self) -> tuple[float, float]:
        """Return bounds of the numbers."""
        low, high = _ends(self.values)
        return min(low * 1.01, 0.0), max(high * 1.01, 0.0)


Weight = Dense | Grouped | InBlocks | PerChannel | Rounded


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
            for rows in read_rows(part, _BAND):
                band = part.rows(rows.start, rows.stop)
                weight[start : start + len(band)].copy_(band)
                start += len(band)
        return weight

    def dense_blocks(self, height: int, dtype: torch.dtype) -> Iterator[Tensor]:
        """Yield the numbers in blocks of `height` rows; the last block may have fewer.

        Each block is contiguous, and a view if possible, so that loading needs the memory of one block in addition to
        the packed weight, not of a second weight.
        """
        n_out, files = self.shape[0], [MappedFile(_stored(part)) for part in self.parts]
        for start in range(0, n_out, height):
            yield self._rows(start, min(start + height, n_out)).to(dtype).contiguous()
            for file in files:
                file.give_back()

    def _rows(self, start: int, stop: int) -> Tensor:
        bands, first = [], 0
        for part in self.parts:
            n_out = part.shape[0]
            low, high = max(start - first, 0), min(stop - first, n_out)
            if low < high:
                bands.append(part.rows(low, high))
            first += n_out
        return bands[0] if len(bands) == 1 else torch.cat(bands)


def read_rows(weight: Weight, height: int) -> Iterator[slice]:
    """Yield bands of `height` rows to read; the memory that a mapped file takes for a band is given back behind it."""
    file = MappedFile(_stored(weight))
    for start in range(0, weight.shape[0], height):
        yield slice(start, min(start + height, weight.shape[0]))
        file.give_back()


def _stored(weight: Weight) -> Tensor:
    """Return the tensor that holds the numbers or codes: [n_out, ...]."""
    if isinstance(weight, Dense | Rounded):
        return weight.values
    return weight.blocks if isinstance(weight, InBlocks) else weight.codes


def _name(codes: Tensor) -> str:
    """The codes in words: the bits of integers count those in use."""
    if codes.dtype is not torch.uint8:
        return str(codes.dtype).removeprefix("torch.")
    return f"uint{max(1, int(codes.max()).bit_length()) if codes.numel() else 0}"


def _half(scale: Tensor) -> Tensor:
    """Return scales as float16, unless one is too large."""
    half = scale.half()
    return scale if half.isinf().any() else half


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
