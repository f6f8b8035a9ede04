"""How a quantized linear layer is stored, as data. Free of torch: the server process reads configurations, too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

WORD_BITS = 32
SCALES = ("F32", "F16", "BF16")  # dtypes of scales, as safetensors calls them


@dataclass(frozen=True, slots=True)
class Packing:
    """Unsigned numbers side by side in words of 32 bits, along the outputs (dimension 0) or the inputs (1)."""

    bits: int
    dim: Literal[0, 1]
    places: tuple[int, ...] = ()  # where in its word each number lies, 0 in the lowest bits; (): in order
    less: int = 0  # what was subtracted from each number before it was stored, modulo 2^bits

    @property
    def per_word(self) -> int:
        """Numbers in a word."""
        return WORD_BITS // self.bits


@dataclass(frozen=True, slots=True)
class Grid:
    """A stored tensor that divides a weight [out, in] into blocks, with a number for each."""

    suffixes: tuple[str, ...]  # how its name ends behind the module's; one of these is stored
    dtypes: tuple[str, ...]
    block: tuple[int, int] = (1, 1)  # outputs and inputs that share a number; 0: all
    transposed: bool = False  # stored [in, out]
    packing: Packing | None = None
    offset: int = 0  # to be added to what is stored

    def cells(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Return how many numbers there are along each dimension of a weight of `shape`."""
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
    zeros: Grid | None = None  # of the same blocks as the scales; None: 0
    groups: str = ""  # suffix of a vector that says to which block of inputs each one belongs; "": in order
    optional: tuple[str, ...] = ()  # suffixes of the above that need not be there
    unread: tuple[str, ...] = ()  # suffixes of what says nothing about the weight, such as scales of activations

    @property
    def grids(self) -> tuple[Grid, ...]:
        """All there are."""
        return tuple(grid for grid in (self.codes, self.scales, self.zeros) if grid is not None)
