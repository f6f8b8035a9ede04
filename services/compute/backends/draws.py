"""The probabilities and noise by which the rows of a step draw tokens, on the host and on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from services.compute.backends.batch import Ints


@dataclass(frozen=True, slots=True)
class Chances:
    """The draw of each of n rows, on the device of the logits."""

    temperature: Tensor  # [n] float32; 0: the best logit
    seeds: Tensor  # [n] int64
    positions: Tensor  # [n] int64, of the drawn tokens


@dataclass(frozen=True, slots=True)
class FilteredRows:
    """Rows that draw from some of the tokens only; 0, 1 and 0 switch a limit off."""

    rows: Tensor  # [m] int64, of the rows that draw
    top_k: Tensor  # [m] int64
    top_p: Tensor  # [m] float64
    min_p: Tensor  # [m] float64
    width: int  # most tokens that a row may keep; 0: all


@dataclass(frozen=True, slots=True)
class DrawRows:
    """Rows that draw a token each on the device, where the following step finds it."""

    slots: Tensor  # [n] int64, different ones
    chances: Chances
    filtered: FilteredRows | None = None  # None: all rows draw from all tokens


@dataclass(frozen=True, slots=True)
class FilterNumbers:
    """`FilteredRows` on the host."""

    rows: Ints  # [m]
    top_k: Ints  # [m]
    top_p: NDArray[np.float64]  # [m]
    min_p: NDArray[np.float64]  # [m]

    @property
    def width(self) -> int:
        """Most tokens that a row may keep; 0: all."""
        return int(self.top_k.max()) if self.top_k.min() > 0 else 0


@dataclass(frozen=True, slots=True)
class DrawNumbers:
    """`DrawRows` on the host."""

    slots: Ints  # [n]
    temperature: NDArray[np.float32]  # [n]
    seeds: Ints  # [n]
    positions: Ints  # [n]
    filtered: FilterNumbers | None = None

    def arrays(self) -> list[NDArray[Any]]:
        """Return what goes to the device."""
        arrays: list[NDArray[Any]] = [self.slots, self.temperature, self.seeds, self.positions]
        if (limits := self.filtered) is not None:
            arrays += [limits.rows, limits.top_k, limits.top_p, limits.min_p]
        return arrays

    def draws(self, tensors: Sequence[Tensor]) -> DrawRows:
        """Return the draws, given their `arrays` on the device."""
        slots, temperature, seeds, positions, *others = tensors
        filtered = None
        if self.filtered is not None:
            rows, top_k, top_p, min_p = others
            filtered = FilteredRows(rows, top_k, top_p, min_p, self.filtered.width)
        return DrawRows(slots, Chances(temperature, seeds, positions), filtered)
