"""Normalisation layers. Every row is computed on its own."""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch.nn import functional as F

from services.worker.kernels.bfloat16 import Bfloat16Kernels
from services.worker.model.spec import ModelSpec
from services.worker.parallel.linear import LinearLoader


class Norm(Protocol):
    """Normalises the last dimension."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the normalised `x`, of the same shape and dtype."""
        ...


class RmsNorm:
    """x / sqrt(mean(x^2) + eps) * weight, computed in float32 (Zhang & Sennrich, arXiv:1910.07467)."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        """`weight`: [size] or [..., size], broadcast against x."""
        size = weight.shape[-1]
        # |x| / sqrt(size) is the root mean square, so hypot(|x|, sqrt(size * eps)) is the divisor times sqrt(size).
        self._weight = weight.float() * math.sqrt(size)
        self._floor = torch.tensor(math.sqrt(size * eps), device=weight.device)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the normalised `x`."""
        wide = x.float()
        length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        return (wide / torch.hypot(length, self._floor)).mul_(self._weight).to(x.dtype)

    def write(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Write the normalised `x` to `out`, which may be `x`."""
        out.copy_(self(x))


class KernelRmsNorm:
    """The same by our kernel."""

    def __init__(self, weight: torch.Tensor, eps: float, kernels: Bfloat16Kernels) -> None:
        """`weight`: [size], or [groups, size] for x [n, groups, size]."""
        self._weight, self._eps, self._kernels = weight.float().contiguous(), eps, kernels

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the normalised `x`."""
        out = torch.empty(x.shape, dtype=x.dtype)
        self.write(x, out)
        return out

    def write(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Write the normalised `x` to `out`, which may be `x`."""
        self._kernels.rms_norm(x, self._weight, self._eps, out)


def make_rms_norm(weight: torch.Tensor, eps: float, kernels: Bfloat16Kernels | None) -> RmsNorm | KernelRmsNorm:
    """Return the norm with `weight` that is fastest here."""
    return RmsNorm(weight, eps) if kernels is None else KernelRmsNorm(weight, eps, kernels)


class LayerNorm:
    """Layer normalisation with an optional bias."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> None:
        self._weight, self._bias, self._eps = weight, bias, eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the normalised `x`."""
        return F.layer_norm(x, self._weight.shape, self._weight, self._bias, self._eps)


def load_norm(spec: ModelSpec, load: LinearLoader, key: str) -> Norm:
    """Return the norm over hidden_size that is stored under `key`."""
    weight = load.source.vector(key, spec.hidden_size).to(load.device)
    if spec.norm == "rms":
        return make_rms_norm(weight.float() + spec.norm_offset, spec.norm_eps, load.kernels)
    bias = load.source.vector(f"{key}.bias", spec.hidden_size).to(load.device, load.dtype) if spec.norm_bias else None
    return LayerNorm(weight.to(load.dtype), bias, spec.norm_eps)
