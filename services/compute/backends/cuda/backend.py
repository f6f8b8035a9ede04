"""CUDA devices: torch's kernels, paged attention in Triton where it agrees with the reference, and NCCL."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch

from services.compute.backends.base import Attention, Computations, Memory, NoGraph, StepGraphs
from services.compute.backends.choice import Candidate, choose_attention
from services.compute.backends.collectives import GroupSeat, LoneRank, StepCommunicator
from services.compute.backends.cuda.fused import open_ops
from services.compute.backends.cuda.graph import CudaDecodes, ReplayableAttention, Uploads
from services.compute.backends.cuda.layer_graphs import ROWS, LayerGraphs, MixedAttention
from services.compute.backends.cuda.memory import CudaMemory
from services.compute.backends.cuda.nccl import NcclCommunicator
from services.compute.backends.cuda.ops import CudaOps
from services.compute.backends.cuda.paged import PagedTriton
from services.compute.backends.cuda.recorder import CudaRecorder, Recorder
from services.compute.backends.cuda.transfers import PinnedTransfers
from services.compute.backends.decodes import Decodes, Tokens
from services.compute.backends.kv_format import Coding, KvFormat
from services.compute.backends.shapes import AttentionShape
from services.compute.backends.torch.backend import TorchBackend
from services.compute.backends.torch.gathering import PagedSdpa
from services.compute.backends.transfers import Transfers


class CudaBackend(TorchBackend):
    """One GPU. Steps with one row per sequence are replayed as a whole, of others all layers but the last."""

    process_group: str | None = "cpu:gloo,cuda:nccl"

    def __init__(
        self,
        dtype: torch.dtype,
        device: torch.device,
        kv_format: KvFormat | None = None,
        *,
        triton: bool = True,
        graphs: bool = True,
    ) -> None:
        """`triton`: use our kernels where they pass their checks; False: only torch's. `graphs`: replay steps."""
        super().__init__(dtype, device, kv_format)
        self._triton, self._graphs = triton, graphs
        if device.index is not None:
            torch.cuda.set_device(device)  # Triton launches on the current device
        # cuDNN's attention builds a plan for every shape, and prompts rarely have the same shape.
        torch.backends.cuda.enable_cudnn_sdp(False)
        ops = open_ops(dtype, device) if triton else CudaOps(dtype, device)
        self.ops, self._own = ops, ops
        self.memory: Memory = CudaMemory(device)
        pinned = PinnedTransfers(device)
        self.transfers: Transfers = pinned
        self._uploads: Uploads = pinned

    def attention(self, shape: AttentionShape) -> Attention[Any]:
        """Return the fastest attention that agrees with the reference."""
        own = self.kv_format.attentions(shape, self) if self._triton else ()
        choices: list[Candidate] = [*own, lambda: PagedSdpa(shape, self.dtype, self.device)]
        return choose_attention(choices, shape, self.dtype, self.device, self.kv_format, chooses=True)

    def over_numbers(self, shape: AttentionShape, numbers: torch.dtype) -> Sequence[Candidate]:
        """Return our kernels over numbers of the backend's dtype."""
        return (lambda: PagedTriton(shape, self.dtype, self.device),) if numbers is self.dtype else ()

    def over_codes(self, shape: AttentionShape, coding: Coding) -> Sequence[Candidate]:
        """Return our kernels over codes of 8 bits."""
        return (lambda: PagedTriton(shape, self.dtype, self.device, coding),)

    def replay_decodes(self, computations: Computations, tokens: Tokens | None) -> Decodes:
        """Return graphs of whole decodes; collectives of NCCL are a part of them."""
        attention, has_states = computations.attention, computations.cache.states is not None
        if not self._graphs or (has_states and not self._own.replays_states):
            return super().replay_decodes(computations, tokens)
        if not isinstance(attention, ReplayableAttention | None):
            return super().replay_decodes(computations, tokens)
        of, adapters = (computations, attention, tokens, self._uploads, self._recorder), self._own.replays_adapters
        return CudaDecodes(*of, self.device, adapters=adapters)

    def capture(self, computations: Computations) -> StepGraphs:
        """Return graphs of the layers, if the attention of a mixed step can be laid out in tensors."""
        attention = computations.attention
        if not self._graphs or not isinstance(attention, MixedAttention) or computations.cache.states is not None:
            return super().capture(computations)
        of, on = (computations, attention, self._uploads, self._recorder), (self.dtype, self.device)
        return StepGraphs(NoGraph(), LayerGraphs(*of, *on, adapters=self._own.replays_adapters))

    @property
    def replayed_rows(self) -> Sequence[int]:
        """The sizes of steps with prompts that are captured at their first use, ascending."""
        return ROWS if self._graphs and self._triton else ()

    @cached_property
    def _recorder(self) -> Recorder:
        """Of all graphs, because only one runs at a time; made at the first, where a GPU is."""
        return CudaRecorder(self.device)

    def join(self, seat: GroupSeat) -> StepCommunicator:
        """Return collectives over NCCL."""
        if seat.size == 1:
            return LoneRank(seat.line)
        return NcclCommunicator(seat.line, seat.timeout_s)
