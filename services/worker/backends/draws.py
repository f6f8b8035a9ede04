"""What the rows of a step draw their tokens by, on the host and on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from services.worker.backends.batch import Ints


@dataclass(frozen=True, slots=True)
class Chances:
    """What each of n rows draws its token by, on the device of the logits."""

    temperature: Tensor  # [n] float32; 0: the best logit
    seeds: Tensor  # [n] int64
    positions: Tensor  # [n] int64, of the drawn tokens


@dataclass(frozen=True, slots=True)
class DrawRows:
    """Rows that draw a token each on the device, where the following step finds it."""

    slots: Tensor  # [n] int64, different ones
    chances: Chances


@dataclass(frozen=True, slots=True)
class DrawNumbers:
    """`DrawRows` on the host."""

    slots: Ints  # [n]
    temperature: NDArray[np.float32]  # [n]
    seeds: Ints  # [n]
    positions: Ints  # [n]

    def arrays(self) -> list[NDArray[Any]]:
        """Return what goes to the device."""
        return [self.slots, self.temperature, self.seeds, self.positions]

    def draws(self, tensors: Sequence[Tensor]) -> DrawRows:
        """Return the draws, given their `arrays` on the device."""
        slots, temperature, seeds, positions = tensors
        return DrawRows(slots, Chances(temperature, seeds, positions))
