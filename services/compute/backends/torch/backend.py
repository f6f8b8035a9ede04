"""The reference backend: any device, no graphs, attention by its definition."""

from __future__ import annotations

from typing import Any

import torch

from services.compute.backends.base import Attention, Computations, NoGraph, Ops, StepGraphs
from services.compute.backends.decodes import Decodes, NoDecodes, Tokens
from services.compute.backends.frames import FrameAttention
from services.compute.backends.kv_format import KvFormat, plain_format
from services.compute.backends.shapes import AttentionShape
from services.compute.backends.torch.attention import ReferenceAttention
from services.compute.backends.torch.bidirectional import BidirectionalAttention
from services.compute.backends.torch.gathering import PagedSdpa
from services.compute.backends.torch.ops import TorchOps


class TorchBackend:
    """The reference for tests of the other backends; it is short, not fast."""

    def __init__(self, dtype: torch.dtype, device: torch.device, kv_format: KvFormat | None = None) -> None:
        """`kv_format`: None for numbers of `dtype`."""
        self.dtype, self.device = dtype, device
        self.kv_format: KvFormat = kv_format or plain_format(dtype)
        self.ops: Ops = TorchOps(dtype, device)

    def attention(self, shape: AttentionShape) -> Attention[Any]:
        """Return the attention of a rank's heads."""
        return ReferenceAttention(shape)

    def bidirectional(self, shape: AttentionShape) -> Attention[Any]:
        """Return the attention of an encoder."""
        return BidirectionalAttention(shape)

    def frames(self, shape: AttentionShape) -> FrameAttention:
        """Return the attention of rows of frames."""
        return PagedSdpa(shape, self.dtype, self.device)

    def capture(self, computations: Computations) -> StepGraphs:
        """Return graphs that serve no step."""
        return StepGraphs(NoGraph(), NoGraph())

    def replay_decodes(self, computations: Computations, tokens: Tokens | None) -> Decodes:
        """Return what serves no step."""
        return NoDecodes()
