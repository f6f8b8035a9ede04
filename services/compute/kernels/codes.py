"""A weight of integers in the layout of `source/quantized.c`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Bits = Literal[2, 4, 8]  # bits of a code
InputBits = Literal[8, 16]

SCALE_ROWS = 64  # rows of packed codes and scales are padded to a multiple of SCALE_ROWS
LEAST_BLOCK = 16  # inputs of a block are a multiple of LEAST_BLOCK
# Most inputs of a block by their bits. With more, sums could leave 32 bits, or 16 for inputs of 8 bits.
MOST_BLOCK: dict[InputBits, int] = {16: 128, 8: 64}
_LINE = 64  # bytes
_BLOCK_BYTES = 8  # bytes of a block's step and sum in a row of inputs


@dataclass(frozen=True, slots=True)
class PackedCodes:
    """Numbers code * scale + offset; a code means code - 2^(bits - 1).

    `k` inputs are in blocks of `block`, the last block may be shorter. An output has a scale for each `common` blocks.
    `scales` and `offsets` are [n_out / 64, scales of an output, 64], both float16 or both float32.
    """

    n_out: int
    n_in: int
    k: int  # n_in in blocks, padded with zeros to a multiple of 16
    block: int
    common: int
    bits: Bits
    input_bits: InputBits  # 8 only with codes of 4 bits
    codes: Tensor
    scales: Tensor
    offsets: Tensor | None
    order: Tensor | None  # [k] int32, the place of each input among the n_in, -1 for padding; None: in order

    @property
    def nbytes(self) -> int:
        """Bytes of the packed weight."""
        parts = (self.codes, self.scales, self.offsets, self.order)
        return sum(part.nbytes for part in parts if part is not None)

    @property
    def input_bytes(self) -> int:
        """Bytes of a row of inputs; never a multiple of 4 KiB, at which rows would compete for the same cache lines."""
        blocks = -(-self.k // self.block)
        lines = -(-(self.k * self.input_bits // 8 + _BLOCK_BYTES * blocks) // _LINE)
        return (lines | 1) * _LINE

    @property
    def arguments(self) -> tuple[int | None, ...]:
        """The numbers as C functions take them: codes, bits, scales, offsets, and whether scales are float16."""
        offsets = None if self.offsets is None else self.offsets.data_ptr()
        numbers = (self.codes.data_ptr(), self.bits, self.input_bits, self.scales.data_ptr(), offsets, self.common)
        return *numbers, self.scales.dtype is torch.float16

    def takes_inputs_of(self, other: PackedCodes) -> bool:
        """Whether both weights multiply the same rows of inputs."""
        mine, others = ((one.n_in, one.k, one.block, one.input_bits) for one in (self, other))
        if mine != others:
            return False
        if self.order is None or other.order is None:
            return self.order is other.order
        return self.order.equal(other.order)
