"""Interface of a method of quantization, for linear layers that share their inputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from services.tools.quantizer.grid import QuantizedWeight
from services.tools.quantizer.scheme import Scheme


@dataclass(frozen=True, slots=True)
class Inputs:
    """Sums over the calibration's rows x [n_rows, n_in] of one input."""

    products: Tensor  # sum of x x^T, [n_in, n_in] float32
    magnitudes: Tensor  # mean of |x|, [n_in] float32
    n_rows: int

    def scaled(self, scale: Tensor) -> Inputs:
        """Return the sums of x / scale."""
        return Inputs(self.products / scale / scale.unsqueeze(1), self.magnitudes / scale, self.n_rows)

    def error(self, difference: Tensor) -> float:
        """Return the sum of the squared outputs of a weight `difference` [n_out, n_in] over the rows."""
        return float(((difference @ self.products) * difference).sum(dtype=torch.float64))


class Method(Protocol):
    """One method; a weight [n_out, n_in] is float32 and may hold several linear layers, one below the other."""

    calibrated: bool  # whether it looks at the inputs
    scales: bool  # whether `scale` says anything

    def fewest(self, n_in: int) -> int:
        """Return the rows of `n_in` inputs that it needs to be better than rounding to nearest."""

    def scale(self, weight: Tensor, inputs: Inputs, scheme: Scheme, dtype: torch.dtype, repeats: Repeats) -> Tensor:
        """Return factors [n_in] for the columns of the weight; what makes the inputs is divided by them."""

    def quantize(self, weight: Tensor, inputs: Inputs | None, scheme: Scheme, dtype: torch.dtype) -> QuantizedWeight:
        """Return the quantized weight; `dtype` is that of stored scales. `inputs`: None if it is not calibrated."""


@dataclass(frozen=True, slots=True)
class Repeats:
    """Inputs that have to have one factor, because one output makes them: query heads share a KV head's values."""

    times: int = 1  # consecutive blocks of inputs made by one block of outputs
    size: int = 1  # inputs of a block

    def mean(self, values: Tensor) -> Tensor:
        """Return `values` [n_in] averaged over the repeats: [n_in / times]."""
        return values.view(-1, self.times, self.size).mean(dim=1).flatten()

    def spread(self, values: Tensor) -> Tensor:
        """Return `values` [n_in / times] for each of its repeats: [n_in]."""
        return values.view(-1, 1, self.size).expand(-1, self.times, -1).flatten()
