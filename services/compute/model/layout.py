"""Describes the storage of a quantized linear layer. Free of torch, because the server process also uses it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

WORD_BITS, _BYTE_BITS = 32, 8
SCALES = ("F32", "F16", "BF16")  # dtypes of scales, by safetensors' names


@dataclass(frozen=True, slots=True)
class Packing:
    """Unsigned numbers packed into words of 32 bits, along the outputs (dimension 0) or the inputs (1).

    With `planes`, the words are bytes, and the numbers of a word are not neighbours: the first numbers of all words are
    the first part of the dimension, the second numbers its second part, and so on.
    """

    bits: int
    dim: Literal[0, 1]
    places: tuple[int, ...] = ()  # place of each number in its word, 0 for the lowest bits; (): in order
    less: int = 0  # subtracted from each number before it was stored, modulo 2^bits
    planes: bool = False

    @property
    def per_word(self) -> int:
        """Number of numbers in a word."""
        return (_BYTE_BITS if self.planes else WORD_BITS) // self.bits


@dataclass(frozen=True, slots=True)
class Grid:
    """A stored tensor that divides a weight [out, in] into blocks, with a number for each."""

    suffixes: tuple[str, ...]  # possible ends of its name, after the module's name
    dtypes: tuple[str, ...]
    block: tuple[int, int] = (1, 1)  # outputs and inputs that share a number; 0: all
    transposed: bool = False  # stored [in, out]
    packing: Packing | None = None
    offset: int = 0  # added to the stored numbers
    inverse: bool = False  # stored as the numbers that divide

    def cells(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Return the number of blocks along each dimension of a weight of `shape`."""
        rows, cols = (-(-size // (block or size)) for size, block in zip(shape, self.block, strict=True))
        return rows, cols

    def stored(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Return the shape of the stored tensor for a weight of `shape`."""
        rows, cols = self.cells(shape)
        if self.packing is not None:
            per_word = self.packing.per_word
            rows, cols = (-(-rows // per_word), cols) if self.packing.dim == 0 else (rows, -(-cols // per_word))
        return (cols, rows) if self.transposed else (rows, cols)


@dataclass(frozen=True, slots=True)
class Layout:
    """Every element of a weight is (code - zero) * scale."""

    codes: Grid
    scales: Grid
    zeros: Grid | None = None  # with the same blocks as the scales; None: 0
    groups: str = ""  # suffix of a vector with each input's block; "": in order
    optional: tuple[str, ...] = ()  # suffixes of the above that may be absent
    unread: tuple[str, ...] = ()  # suffixes of tensors that do not concern the weight, such as scales of activations
    symmetric: bool = False  # all zeros are the middle of the codes, however the tensor of zeros says so
    microscaled: bool = False  # codes are floats of 4 bits and scales exponents of 2, of a stack of matrices (MXFP4)

    @property
    def grids(self) -> tuple[Grid, ...]:
        """All grids of the layout."""
        return tuple(grid for grid in (self.codes, self.scales, self.zeros) if grid is not None)
