"""The reference backend: any device, nothing captured, attention as its definition says."""

from __future__ import annotations

from typing import Any

import torch

from services.worker.backends.base import Attention, AttentionShape, Computations, NoGraph, Ops, StepGraphs
from services.worker.backends.torch.attention import ReferenceAttention
from services.worker.backends.torch.ops import TorchOps


class TorchBackend:
    """What the others are tested against. Made to be read, not to serve."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        self.ops: Ops = TorchOps(dtype, device)

    def attention(self, shape: AttentionShape) -> Attention[Any]:
        """Return the attention of a rank's heads."""
        return ReferenceAttention(shape)

    def capture(self, computations: Computations) -> StepGraphs:
        """Every step is computed as it comes."""
        return StepGraphs(NoGraph(), NoGraph())
