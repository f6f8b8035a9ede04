"""Curves in float32, of operations that round every number alike; torch's own round the last ones otherwise."""

from __future__ import annotations

import torch
from torch import Tensor


def sigmoid(x: Tensor) -> Tensor:
    """Return 1 / (1 + exp(-x))."""
    return 1 / (1 + torch.exp(-x))


def silu(x: Tensor) -> Tensor:
    """Return x * sigmoid(x)."""
    return x * sigmoid(x)


def softplus(x: Tensor) -> Tensor:
    """Return log(1 + exp(x)), or x where it is large."""
    return torch.where(x > 20.0, x, torch.log1p(torch.exp(x.clamp(max=20.0))))
