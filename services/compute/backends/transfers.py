"""A step's numbers on their way to a device, and its tokens on their way back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.int64]
Numbers = NDArray[Any]


class Pending(Protocol):
    """Numbers that a device computes."""

    def arrived(self) -> bool:
        """Whether `values` would return at once."""

    def values(self) -> Ints:
        """Wait for the numbers, [n]."""


class Transfers(Protocol):
    """Copies between the host and a device, in the order of the device's computations."""

    def up(self, arrays: Sequence[Numbers]) -> list[Tensor]:
        """Return the arrays on the device, with their dtypes; the host does not wait."""

    def down(self, numbers: Tensor) -> Pending:
        """Begin to copy `numbers` [n] int64 to the host."""


@dataclass(frozen=True, slots=True)
class Arrived:
    """Numbers on the host."""

    numbers: Ints

    def arrived(self) -> bool:
        """Return True."""
        return True

    def values(self) -> Ints:
        """Return the numbers."""
        return self.numbers


class DirectTransfers:
    """Copies by torch; on CPUs there is nothing to copy."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def up(self, arrays: Sequence[Numbers]) -> list[Tensor]:
        """Return the arrays on the device."""
        tensors = [torch.from_numpy(array) for array in arrays]
        return tensors if self._device.type == "cpu" else [tensor.to(self._device) for tensor in tensors]

    def down(self, numbers: Tensor) -> Arrived:
        """Wait for the numbers."""
        return Arrived(numbers.cpu().numpy())
