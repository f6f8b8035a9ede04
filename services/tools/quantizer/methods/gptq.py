"""GPTQ: rounds one input after another, and moves the error to inputs that are not rounded yet.

Frantar et al., arXiv:2210.17323, with groups whose grids are fixed before rounding, and inputs in the order of their
energy ("actorder": "static" of other programs), so that stored codes keep the order of the inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from services.tools.quantizer.grid import QuantizedWeight, search_grid
from services.tools.quantizer.methods.base import Inputs, Repeats
from services.tools.quantizer.scheme import Scheme

_DAMPING = 0.01  # share of the mean diagonal of the products, added to the diagonal
_BLOCK = 32  # inputs whose errors are moved to the later ones in one product


class Gptq:
    """Minimises the error of the outputs over the calibration's rows."""

    calibrated = True
    scales = False

    def fewest(self, n_in: int) -> int:
        """Return `n_in`: of fewer rows the products are singular, and the errors are fitted to their noise."""
        return n_in

    def scale(self, weight: Tensor, inputs: Inputs, scheme: Scheme, dtype: torch.dtype, repeats: Repeats) -> Tensor:
        """Return ones."""
        return torch.ones_like(inputs.magnitudes)

    def quantize(self, weight: Tensor, inputs: Inputs | None, scheme: Scheme, dtype: torch.dtype) -> QuantizedWeight:
        """Return the rounded weight."""
        assert inputs is not None
        energy = inputs.products.diagonal()
        grid = search_grid(weight, scheme, dtype, energy)
        order = torch.argsort(energy, descending=True, stable=True)
        codes = _round(weight[:, order], _factor(inputs.products[order][:, order]), *grid.columns(order), scheme.levels)
        return QuantizedWeight(codes[:, torch.argsort(order)].contiguous(), grid)


def _factor(products: Tensor) -> Tensor:
    """Return the upper Cholesky factor of the inverse of the damped products, [n_in, n_in] float32.

    It is computed in float64, because products of few or dependent rows are nearly singular.
    """
    damped = products.double()
    diagonal = damped.diagonal()
    diagonal[diagonal == 0] = 1  # an input that is always 0: its error costs nothing
    diagonal += _DAMPING * diagonal.mean()
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    factor: Tensor = torch.linalg.cholesky(inverse, upper=True)
    return factor.float()


def _round(weight: Tensor, factor: Tensor, scale: Tensor, zero: Tensor, levels: int) -> Tensor:
    """Return the codes [n_out, n_in] uint8; the columns of all arguments are in the order of rounding."""
    left, codes = weight.clone(), torch.empty_like(weight, dtype=torch.uint8)
    n_in = weight.shape[1]
    for start in range(0, n_in, _BLOCK):
        stop = min(start + _BLOCK, n_in)
        block, errors = left[:, start:stop], torch.empty_like(left[:, start:stop])
        within = factor[start:stop, start:stop]
        for i in range(stop - start):
            column, at = block[:, i], start + i
            code = ((column / scale[:, at]).round_() + zero[:, at]).clamp_(0, levels)
            codes[:, at] = code.to(torch.uint8)
            error = (column - (code - zero[:, at]) * scale[:, at]) / within[i, i]
            errors[:, i] = error
            block[:, i + 1 :].addr_(error, within[i, i + 1 :], alpha=-1)
        left[:, stop:].addmm_(errors, factor[start:stop, stop:], alpha=-1)
    return codes
