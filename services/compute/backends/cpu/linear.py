"""Weights on a CPU, in layouts whose products have rows that do not depend on other rows."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor
from torch.nn import functional as F

from services.compute.backends.weights import Stacked
from services.compute.kernels.bfloat16 import PACKED_ROWS, TILE_K, Bfloat16Kernels

_BLOCK = 16 * PACKED_ROWS  # rows of a weight that are packed at once


class PackedLinear:
    """A weight in oneDNN's blocked layout.

    Measured with oneDNN 3.12: with its AVX2 and AVX512 kernels, rows are bitwise equal for every number of rows from 2
    on. AVX512 sums a single row in another order, hence the padding. Its AMX kernels, which may divide K by the number
    of rows, are never used: where the operating system grants tile registers, `KernelLinear` serves bfloat16.
    """

    min_rows = 2

    def __init__(self, weight: Stacked, bias: Tensor | None, dtype: torch.dtype) -> None:
        self._bias = bias
        (whole,) = weight.dense_blocks(weight.shape[0], dtype)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(whole, None)
        self._multiply = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, x: Tensor) -> Tensor:
        """Return x W^T + bias: [n, n_in] -> [n, n_out]."""
        n = x.shape[0]
        if n < self.min_rows:
            return self(F.pad(x, (0, 0, 0, self.min_rows - n)))[:n]
        return self._multiply(x, self._weight, self._bias, "none", [], "")  # type: ignore[no-any-return]

    def in_float32(self, x: Tensor) -> Tensor:
        """Return the product, rounded to the dtype of the weight, in float32."""
        return self(x).float()


def check_rows(ids: Tensor, n_rows: int) -> None:
    """Raise IndexError unless all rows `ids` are there: kernels read memory without a check."""
    low, high = torch.aminmax(ids)
    if low < 0 or high >= n_rows:
        raise IndexError(f"a row to look up is outside 0 to {n_rows - 1}: {ids.tolist()}")


class KernelProduct(ABC):
    """A product by our kernels, which write it in bfloat16 or float32."""

    def __init__(self, kernels: Bfloat16Kernels, weight: Stacked) -> None:
        self._kernels = kernels
        self._n_out, self._n_in = weight.shape

    def __call__(self, x: Tensor) -> Tensor:
        """Return x W^T + bias: [n, n_in] -> [n, n_out]."""
        return self._product(x, torch.bfloat16)

    def in_float32(self, x: Tensor) -> Tensor:
        """Return the unrounded sums in float32."""
        return self._product(x, torch.float32)

    def _product(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        out = torch.empty(x.shape[0], self._n_out, dtype=dtype)
        self.write(x, out)
        return out

    @abstractmethod
    def write(self, x: Tensor, out: Tensor) -> None:
        """Write the product to `out` [n, n_out], bfloat16 or float32."""


class KernelLinear(KernelProduct):
    """A bfloat16 weight, packed for our own kernel."""

    def __init__(self, kernels: Bfloat16Kernels, weight: Stacked, bias: Tensor | None) -> None:
        super().__init__(kernels, weight)
        self._missing = -self._n_in % TILE_K
        width = self._n_in + self._missing
        blocks = (self._padded(block) for block in weight.dense_blocks(_BLOCK, torch.bfloat16))
        self._weight = kernels.pack_blocks(blocks, self._n_out, width)
        self._bias = None if bias is None else bias.float()
        self._spare = kernels.spare(width)

    def rows(self, ids: Tensor) -> Tensor:
        """Return the rows `ids` [n] of the weight, unpacked: [n, n_in]."""
        check_rows(ids, self._n_out)
        return self._kernels.unpack(self._weight, ids)[:, : self._n_in].contiguous()

    def _padded(self, x: Tensor) -> Tensor:
        return F.pad(x, (0, self._missing)) if self._missing else x

    def write(self, x: Tensor, out: Tensor) -> None:
        """Write the product to `out` [n, n_out], bfloat16 or float32."""
        self._kernels.linear(self._padded(x), self._weight, self._bias, out, self._spare)
