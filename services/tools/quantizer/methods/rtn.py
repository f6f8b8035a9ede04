"""Round to nearest: the levels span each group's range. Needs no calibration."""

from __future__ import annotations

import torch
from torch import Tensor

from services.tools.quantizer.grid import QuantizedWeight, range_grid
from services.tools.quantizer.methods.base import Inputs, Repeats
from services.tools.quantizer.scheme import Scheme


class RoundToNearest:
    """Rounds every number to its nearest level."""

    calibrated = False
    scales = False

    def fewest(self, n_in: int) -> int:
        """Return 0."""
        return 0

    def scale(self, weight: Tensor, inputs: Inputs, scheme: Scheme, dtype: torch.dtype, repeats: Repeats) -> Tensor:
        """Return ones."""
        return torch.ones_like(inputs.magnitudes)

    def quantize(self, weight: Tensor, inputs: Inputs | None, scheme: Scheme, dtype: torch.dtype) -> QuantizedWeight:
        """Return the rounded weight."""
        return self.rounded(weight, scheme, dtype)

    def rounded(self, weight: Tensor, scheme: Scheme, dtype: torch.dtype) -> QuantizedWeight:
        """Return the rounded weight; no inputs are needed."""
        grid = range_grid(weight, scheme, dtype)
        return QuantizedWeight(grid.round(weight), grid)
