"""Products of a few rows by our kernel, for the weights and numbers of rows at which it won a race at the start."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from services.compute.backends.torch.ops import TorchLinear

MOST_ROWS = 64
_FEW_ROWS = 16  # of the smallest product on tensor cores
_LEAST_INS = 64  # that a program reads at a time
_ENOUGH_OUTS = 2048  # of which programs with 16 each occupy a GPU
_LEAST_SHARE, _MOST_SHARES = 512, 8
_ADDED = 1024  # columns of a program that adds up shares
DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Tiling:
    """What one program of the kernel computes."""

    outs: int
    ins: int  # read at a time, or fewer where they do not divide the inputs
    warps: int
    stages: int


TILINGS = (Tiling(16, 256, 4, 4), Tiling(32, 128, 4, 4), Tiling(64, 128, 4, 4))

# Maps a weight's [n_out, n_in] and a number of rows to how our kernel computes their product; None: torch does.
Choose = Callable[[torch.Size, int], Tiling | None]


def reads(weight: Tensor) -> bool:
    """Whether the kernel multiplies with `weight` [n_out, n_in]."""
    n_out, n_in = weight.shape
    return weight.dtype in DTYPES and n_out > 0 and _tile(n_in // n_shares(weight.shape)) >= _LEAST_INS


def n_shares(shape: torch.Size) -> int:
    """Return the shares that the inputs of a weight [n_out, n_in] are divided into, whatever rows it is given."""
    (n_out, n_in), found = shape, 1
    while found < _MOST_SHARES and found * n_out < _ENOUGH_OUTS and n_in % (2 * found * _LEAST_SHARE) == 0:
        found *= 2
    return found


def multiply(
    kernels: Any, x: Tensor, weight: Tensor, bias: Tensor | None, tiling: Tiling, dtype: torch.dtype
) -> Tensor:
    """Return x W^T + bias in `dtype`: [n, n_in] -> [n, n_out], n from 1 to MOST_ROWS."""
    (n_out, n_in), n, shares = weight.shape, len(x), n_shares(weight.shape)
    x = x if x.stride(1) == 1 else x.contiguous()
    out = torch.empty((n, n_out), dtype=dtype, device=x.device)
    parts = out if shares == 1 else torch.empty((shares, n, n_out), dtype=torch.float32, device=x.device)
    any_bias, share = weight if bias is None else bias, n_in // shares
    kernels.product[(-(-n_out // tiling.outs), shares)](
        x,
        weight,
        any_bias,
        parts,
        n,
        x.stride(0),
        n_out,
        n_in,
        share,
        n_shares=shares,
        has_bias=bias is not None,
        tile_rows=_FEW_ROWS if n <= _FEW_ROWS else MOST_ROWS,
        tile_outs=tiling.outs,
        tile_ins=min(tiling.ins, _tile(share)),
        num_warps=tiling.warps,
        num_stages=tiling.stages,
    )
    if shares > 1:
        kernels.add_shares[(n, -(-n_out // _ADDED))](
            parts,
            any_bias,
            out,
            n_out,
            n * n_out,
            n_shares=shares,
            has_bias=bias is not None,
            n_columns=_ADDED,
            num_warps=4,
        )
    return out


class SkinnyLinear(TorchLinear):
    """A dense weight, multiplied with few rows by whichever `choose` names, with more by torch."""

    def __init__(self, kernels: Any, weight: Tensor, bias: Tensor | None, choose: Choose) -> None:
        super().__init__(weight, bias)
        self._kernels, self._choose = kernels, choose

    def __call__(self, x: Tensor) -> Tensor:
        """Return x W^T + bias: [n, n_in] -> [n, n_out]."""
        tiling = self._choose(self._weight.shape, len(x))
        return super().__call__(x) if tiling is None else self._ours(x, tiling, x.dtype)

    def in_float32(self, x: Tensor) -> Tensor:
        """Return the product in float32: the unrounded sums of our kernel, or torch's rounded ones."""
        tiling = self._choose(self._weight.shape, len(x))
        return super().in_float32(x) if tiling is None else self._ours(x, tiling, torch.float32)

    def _ours(self, x: Tensor, tiling: Tiling, dtype: torch.dtype) -> Tensor:
        return multiply(self._kernels, x, self._weight, self._bias, tiling, dtype)


def _tile(n_ins: int) -> int:
    """Return the largest power of two that divides `n_ins`."""
    return n_ins & -n_ins
