"""The norms of the residual stream, and of rows that the ranks divide."""

from __future__ import annotations

import torch

from services.compute.backends.base import Norm
from services.compute.backends.collectives import Communicator
from services.compute.model.layers.linear import LinearLoader
from services.compute.model.spec import ModelSpec


def load_norm(spec: ModelSpec, load: LinearLoader, key: str) -> Norm:
    """Return the norm over hidden_size with the weights stored under `key`."""
    backend = load.backend
    weight = load.source.vector(key, spec.hidden_size).to(backend.device).float() + spec.norm_offset
    if spec.norm == "rms":
        return backend.ops.rms_norm(weight, spec.norm_eps)
    bias = None
    if spec.norm_bias:
        bias = load.source.vector(f"{key}.bias", spec.hidden_size).to(backend.device, backend.dtype)
    return backend.ops.layer_norm(weight.to(backend.dtype), bias, spec.norm_eps)


class DividedNorm:
    """RMS norm of rows that the ranks divide."""

    def __init__(self, weight: torch.Tensor, size: int, eps: float, comm: Communicator) -> None:
        """`weight`: this rank's share of `size` elements."""
        self._weight, self._eps, self._comm = weight, eps, comm
        self._share = torch.tensor(1 / size, device=weight.device)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the normalised share [n, share] of rows."""
        exact = x.float()
        lengths = torch.linalg.vector_norm(exact, dim=-1, keepdim=True)
        mean = self._comm.all_reduce(lengths.square_().mul_(self._share))
        return (exact * torch.rsqrt(mean + self._eps) * self._weight).to(x.dtype)


def load_divided_norm(load: LinearLoader, key: str, size: int, eps: float) -> Norm:
    """Return the RMS norm over `size` elements that the ranks divide, with the weights stored under `key`."""
    weight = load.source.vector(key, size, load.share(size)).to(load.backend.device).float()
    if load.comm.size == 1:
        return load.backend.ops.rms_norm(weight, eps)
    return DividedNorm(weight, size, eps, load.comm)
