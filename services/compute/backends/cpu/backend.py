"""CPU backends: our kernels where they apply, otherwise torch and oneDNN.

Both guarantee that a row's bits depend only on its own sequence, not on the other rows of a step, the division of a
prompt into chunks, or the number of threads. Sums over ranks are computed in float32, in rank order, and rounded once.
The two backends give different bits.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from services.common.heap import trim
from services.compute.backends.base import Attention, Backend, Computations, Memory, StepGraphs
from services.compute.backends.choice import Candidate, choose_attention
from services.compute.backends.collectives import GroupSeat, StepCommunicator
from services.compute.backends.cpu.attention import INT8, PagedAmx, PagedInt8, PagedKernels, PagedVectors
from services.compute.backends.cpu.collectives import ReplayedLoneRank
from services.compute.backends.cpu.graph import MAX_DECODES, MAX_ROWS, KernelGraph
from services.compute.backends.cpu.ops import KernelOps, OneDnnOps
from services.compute.backends.cpu.paging import folder_on_disk, page_out
from services.compute.backends.cpu.parked import park_in_file
from services.compute.backends.cpu.shared_memory import KernelCommunicator, SharedMemoryCommunicator
from services.compute.backends.kv_format import Coding, KvFormat
from services.compute.backends.mapped import give_back_code
from services.compute.backends.parking import Restore, tensors_on
from services.compute.backends.shapes import AttentionShape
from services.compute.backends.sizing import available_host_memory
from services.compute.backends.torch.backend import TorchBackend
from services.compute.backends.torch.gathering import PagedSdpa
from services.compute.backends.transfers import DirectTransfers, Transfers
from services.compute.kernels.attention import open_attention, serves
from services.compute.kernels.bfloat16 import (
    HEAD_MULTIPLE,
    MAX_HEAD_DIM,
    Bfloat16Kernels,
    open_kernels,
    why_not,
)
from services.compute.kernels.library import RegistersRefusedError

logger = logging.getLogger(__name__)

CPU = torch.device("cpu")


class HostMemory:
    """The machine's memory, which the ranks share evenly."""

    def held(self) -> int:
        """Bytes that this process has allocated."""
        lines = Path("/proc/self/status").read_text().splitlines()
        # Excludes the mapped checkpoint, which the kernel can drop.
        return int(next(line for line in lines if line.startswith("RssAnon:")).split()[1]) * 1024

    def release(self) -> None:
        """Give freed memory back, which the allocator keeps otherwise: see `rank_environment`."""
        trim()

    def rest(self) -> None:
        """Give back freed memory, memory that can move to a disk, and the program's code."""
        self.release()
        try:
            page_out()
        except OSError as error:
            logger.warning("the process keeps its memory while it sleeps: %s", error)
        give_back_code()

    def available(self, ranks: int) -> int:
        """Bytes that this rank may still allocate."""
        return available_host_memory() // ranks


class KernelMemory(HostMemory):
    """The machine's memory with weights in the layout of our kernels, which a file can hold."""

    def park(self) -> Restore:
        """Move all tensors to a file; the returned function brings them back. Raises OSError, and moves none."""
        return park_in_file(tensors_on(CPU), folder_on_disk(), available_host_memory())


class OneDnnBackend(TorchBackend):
    """A CPU with torch and oneDNN; attention uses our kernels where they support the dtype and the heads."""

    process_group: str | None = None  # collectives use shared memory
    replayed_rows: Sequence[int] = ()

    def __init__(self, dtype: torch.dtype, kv_format: KvFormat | None = None) -> None:
        """`kv_format`: None for numbers of `dtype`."""
        super().__init__(dtype, CPU, kv_format)
        self.ops = OneDnnOps(dtype)
        self.memory: Memory = HostMemory()
        self.transfers: Transfers = DirectTransfers(CPU)
        self._passed: set[tuple[AttentionShape, type]] = set()  # attentions that passed their check

    def attention(self, shape: AttentionShape) -> Attention[Any]:
        """Return the fastest attention that agrees with the reference. Raises RuntimeError."""
        own = self.kv_format.attentions(shape, self)
        if not own and self.kv_format.numbers is None:
            logger.warning("each step gathers and dequantizes keys in %s, which takes long", self.kv_format.name)
        choices: list[Candidate] = [*own, lambda: PagedSdpa(shape, self.dtype, CPU)]
        return choose_attention(choices, shape, self.dtype, CPU, self.kv_format, self._passed)

    def over_numbers(self, shape: AttentionShape, numbers: torch.dtype) -> Sequence[Candidate]:
        """Return our kernel over numbers of the backend's dtype."""
        return self._vectors(PagedVectors, shape) if numbers is self.dtype else ()

    def over_codes(self, shape: AttentionShape, coding: Coding) -> Sequence[Candidate]:
        """Return our kernel over int8."""
        return self._vectors(PagedInt8, shape) if coding == INT8 else ()

    def _vectors(self, paged: type[PagedKernels], shape: AttentionShape) -> Sequence[Candidate]:
        if shape.slopes or shape.sinks or not serves(self.dtype, shape.head_dim):
            return ()
        kernel = open_attention(self.dtype)
        return (lambda: paged(shape, kernel),)

    def join(self, seat: GroupSeat) -> StepCommunicator:
        """Return collectives in shared memory."""
        return ReplayedLoneRank(seat.line) if seat.size == 1 else SharedMemoryCommunicator(seat)


class KernelBackend(OneDnnBackend):
    """A CPU with our kernels, in bfloat16. Steps of few rows are replayed."""

    def __init__(self, kernels: Bfloat16Kernels, kv_format: KvFormat | None = None) -> None:
        super().__init__(torch.bfloat16, kv_format)
        self.kernels = kernels
        self.ops = KernelOps(kernels)
        self.memory = KernelMemory()

    def over_numbers(self, shape: AttentionShape, numbers: torch.dtype) -> Sequence[Candidate]:
        """Return the fastest kernel over bfloat16."""
        if numbers is not self.dtype or not _fits(shape, self.kernels.head_multiple):
            return super().over_numbers(shape, numbers)
        paged = PagedAmx if self.kernels.amx else PagedVectors
        return (lambda: paged(shape, self.kernels),)

    def over_codes(self, shape: AttentionShape, coding: Coding) -> Sequence[Candidate]:
        """Return the kernel over int8."""
        if coding != INT8 or not _fits(shape, HEAD_MULTIPLE):
            return super().over_codes(shape, coding)
        return (lambda: PagedInt8(shape, self.kernels),)

    def capture(self, computations: Computations) -> StepGraphs:
        """Return graphs that replay steps, if these kernels also compute the attention."""
        attention = computations.attention
        if not isinstance(attention, PagedKernels) or attention.kernels is not self.kernels:
            return super().capture(computations)
        return StepGraphs(
            decodes=KernelGraph(computations.decode, computations, self.kernels, MAX_DECODES),
            layers=KernelGraph(computations.layers, computations, self.kernels, MAX_ROWS),
        )

    def join(self, seat: GroupSeat) -> StepCommunicator:
        """Return collectives in shared memory that kernels can call."""
        return ReplayedLoneRank(seat.line) if seat.size == 1 else KernelCommunicator(seat, self.kernels)


def _fits(shape: AttentionShape, multiple: int) -> bool:
    """Whether the kernels that are replayed compute such heads."""
    return not (shape.slopes or shape.sinks or shape.head_dim % multiple or shape.head_dim > MAX_HEAD_DIM)


def open_cpu(dtype: torch.dtype, kv_format: KvFormat | None = None) -> Backend:
    """Return the backend for `dtype` on this CPU, and log the choice and its reason.

    Raises RuntimeError when our kernels apply but are missing, or when their threads cannot be started.
    """
    reason = why_not(dtype)
    if not reason:
        try:
            kernels = open_kernels()
        except RegistersRefusedError as refused:
            reason = str(refused)
            logger.warning("%s: torch's kernels serve, at a fraction of the speed", refused)
        else:
            logger.info("kernels: ours for %s", kernels.made_for)
            return KernelBackend(kernels, kv_format)
    logger.info("kernels: torch's, because %s", reason)
    return OneDnnBackend(dtype, kv_format)
