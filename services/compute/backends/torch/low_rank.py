"""Factors of adapters as pairs of a device's linear layers: the reference."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from services.compute.backends.base import Linear
from services.compute.backends.batch import AdapterRows
from services.compute.backends.weights import Dense, Stacked


class LinearPairs:
    """Two linear layers for each slot. Bits of a row depend on other rows no more than those of the device's linear."""

    def __init__(self, linear: Callable[[Stacked, Tensor | None], Linear]) -> None:
        self._linear = linear
        self._pairs: dict[int, tuple[Linear, Linear]] = {}

    def put(self, slot: int, a: Tensor, b: Tensor) -> None:
        """Set the factors of `slot`: `a` [rank, n_in], `b` [n_out, rank]."""
        first, second = (self._linear(Stacked((Dense(factor),)), None) for factor in (a, b))
        self._pairs[slot] = first, second

    def clear(self, slot: int) -> None:
        """Remove the factors of `slot`."""
        self._pairs.pop(slot, None)

    def add_(self, y: Tensor, x: Tensor, adapters: AdapterRows) -> None:
        """Add the product with each row of `x` and its slot's factors to `y`."""
        for slot, rows in adapters.by_slot:
            if (pair := self._pairs.get(slot)) is not None:
                a, b = pair
                y.index_add_(0, rows, b(a(x.index_select(0, rows))))
