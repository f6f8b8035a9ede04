"""AWQ: scales inputs of large activations up before rounding, and what makes them down, which changes no output.

Lin et al., arXiv:2306.00978. The exponent is searched for each set of layers that share inputs; the error is that of
their outputs. Groups are then clipped to the part of their range with the smallest weighted error.
"""

from __future__ import annotations

import torch
from torch import Tensor

from services.tools.quantizer.grid import QuantizedWeight, range_grid, search_grid
from services.tools.quantizer.methods.base import Inputs, Repeats
from services.tools.quantizer.scheme import Scheme

_STEPS = 20  # exponents from 0 to below 1
_FEWEST_ROWS = 32
_SMALLEST = 1e-4  # factors stay within a range that every dtype can hold


class Awq:
    """Protects the inputs that matter by their magnitude."""

    calibrated = True
    scales = True

    def fewest(self, n_in: int) -> int:
        """Return a number from which magnitudes mean something, whatever `n_in` is."""
        return _FEWEST_ROWS

    def scale(self, weight: Tensor, inputs: Inputs, scheme: Scheme, dtype: torch.dtype, repeats: Repeats) -> Tensor:
        """Return the power of the inputs' magnitudes with the smallest error of the outputs."""
        magnitudes = repeats.mean(inputs.magnitudes).clamp(min=_SMALLEST)
        best, best_error = torch.ones_like(inputs.magnitudes), float("inf")
        for step in range(_STEPS):
            powers = magnitudes ** (step / _STEPS)
            factors = repeats.spread((powers / (powers.max() * powers.min()).sqrt()).clamp(min=_SMALLEST))
            scaled = weight * factors
            grid = range_grid(scaled, scheme, dtype)
            error = inputs.error(grid.numbers(grid.round(scaled)) / factors - weight)
            if error < best_error:
                best, best_error = factors, error
        return best

    def quantize(self, weight: Tensor, inputs: Inputs | None, scheme: Scheme, dtype: torch.dtype) -> QuantizedWeight:
        """Return the clipped and rounded weight, whose columns are scaled already."""
        assert inputs is not None
        grid = search_grid(weight, scheme, dtype, inputs.products.diagonal())
        return QuantizedWeight(grid.round(weight), grid)
