"""The computations of a layer on CUDA: torch's, with each norm in one kernel, and experts without the host."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import functional as F

from services.compute.backends.base import Expert, Experts, LogitShard, LowRank, RmsNorm
from services.compute.backends.cuda.experts import CudaExperts
from services.compute.backends.cuda.logit_shard import CudaLogitShard
from services.compute.backends.cuda.low_rank import CudaLowRank
from services.compute.backends.names import Activation
from services.compute.backends.shapes import ExpertsShape
from services.compute.backends.torch.experts import ExpertStack, Router
from services.compute.backends.torch.ops import TorchOps


class CudaRmsNorm:
    """RMS norm by torch's kernel, which computes in float32 and rounds once."""

    def __init__(self, weight: Tensor, eps: float, dtype: torch.dtype) -> None:
        """`weight`: [size] or [..., size], broadcast against x of `dtype`."""
        self._eps, self._dtype = eps, dtype
        rounded = weight.to(dtype)
        # The kernel takes one weight of x's dtype for all rows. Other weights need a computation in float32.
        self._exact = weight.dim() == 1 and torch.equal(rounded.float(), weight.float())
        self._weight = rounded if self._exact else weight.float()

    def __call__(self, x: Tensor) -> Tensor:
        """Return the normalised `x`."""
        size = (x.shape[-1],)
        if self._exact:
            return F.rms_norm(x, size, self._weight, self._eps)
        return F.rms_norm(x.float(), size, None, self._eps).mul_(self._weight).to(self._dtype)

    def write(self, x: Tensor, out: Tensor) -> None:
        """Write the normalised `x` to `out`, which may be `x`."""
        out.copy_(self(x))


class CudaOps(TorchOps):
    """Plain torch except for the norms, the experts and the factors of adapters."""

    @property
    def replays_adapters(self) -> bool:
        """Whether graphs can hold the products of adapters; here the host chooses the rows of each slot."""
        return False

    @property
    def replays_states(self) -> bool:
        """Whether graphs can hold convolutions and scans; here the host knows the rows of the states."""
        return False

    def rms_norm(self, weight: Tensor, eps: float) -> RmsNorm:
        """Return the norm with `weight`."""
        return CudaRmsNorm(weight, eps, self._dtype)

    def low_rank(self, n_out: int, n_in: int, slots: int, max_rank: int) -> LowRank:
        """Return empty factors of `slots` adapters for a layer [n_out, n_in]."""
        return CudaLowRank(n_out, n_in, slots, max_rank, self._dtype, self._device)

    def experts(
        self, weights: Iterable[Expert], shape: ExpertsShape, activation: Activation, correction: Tensor | None = None
    ) -> Experts:
        """Return the experts with these `weights`."""
        gate, router = self._between(activation, shape), Router(shape.routing, correction)
        return CudaExperts(ExpertStack.of(weights, shape, self._dtype, self._device), shape, router, gate)

    def logit_shard(self, first_id: int, n_columns: int) -> LogitShard:
        """Return the shard of the columns from token `first_id` on."""
        return CudaLogitShard(first_id, n_columns, self._device)
