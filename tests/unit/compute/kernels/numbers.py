"""Random tensors, and how far a result may be from the exact one."""

from __future__ import annotations

import torch

HALF_ULP = 2.0**-8  # bfloat16, relative
FLOAT32 = 2.0**-23


def normal(seed: int, *shape: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Values from N(0, scale^2)."""
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def assert_rounded(actual: torch.Tensor, exact: torch.Tensor, slack: torch.Tensor | float = 0.0) -> None:
    """`found` is `exact` (float64) rounded to nearest, give or take `slack` before rounding."""
    bits = 8 if actual.dtype is torch.bfloat16 else 24
    farthest = exact.abs() + slack  # may be beyond a power of two, where the roundings are twice as coarse
    half_ulp = (farthest.frexp().exponent - bits - 1).double().exp2()
    allowed = half_ulp * (1 + 4 * FLOAT32) + exact.abs() * FLOAT32 * 2 + slack
    wrong = ~((actual.double() - exact).abs() <= allowed + 1e-37)  # smaller ones are flushed to zero; NaN is also wrong
    assert not wrong.any(), (wrong.nonzero()[:5].tolist(), actual[wrong][:5], exact[wrong][:5])
