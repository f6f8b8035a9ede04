"""Replayed steps: captured once, then run at any size without Python between the kernels."""

from __future__ import annotations

import logging
from dataclasses import replace

import torch

from services.compute.backends.base import Computations, Compute, Step
from services.compute.backends.batch import AdapterRows, StepBatch, long_tensor
from services.compute.backends.cpu.attention import KernelPlan
from services.compute.backends.cpu.collectives import ReplayedCollectives
from services.compute.backends.states import StatePlan
from services.compute.kernels.bfloat16 import Bfloat16Kernels, StepSizes
from services.compute.kernels.capture import CapturedGraph, GraphCapture, NotReplayableError

logger = logging.getLogger(__name__)

# Most rows of a replayed step: with more rows, kernels take so long that Python between them does not matter.
MAX_DECODES = 64  # and drafts
MAX_ROWS = 512
_MAX_CAPTURED = 64  # most rows of a captured step, because a capture keeps all tensors of all layers


class KernelGraph:
    """Replays `compute` for up to `max_rows` rows.

    Serves no more steps once a step has needed more than our kernels.
    """

    def __init__(self, compute: Compute, computations: Computations, kernels: Bfloat16Kernels, max_rows: int) -> None:
        """`compute` is one of the fields of `computations`."""
        self._max_rows, self._compute, self._computations, self._kernels = max_rows, compute, computations, kernels
        comm = computations.comm
        self._reduce = comm.all_reduce
        self._collectives = comm.collectives if isinstance(comm, ReplayedCollectives) else None
        self._graph: CapturedGraph | None = None
        self._gave_up = False
        # The inputs that change from step to step, always at the same addresses. A sequence has at least one row.
        self._x = torch.empty(max_rows, computations.hidden_size, dtype=torch.bfloat16)
        self._positions, self._kv_slots, self._lengths = torch.zeros(3, max_rows, dtype=torch.int64)
        self._pages = torch.zeros(max_rows, dtype=torch.int64)
        self._adapters = torch.full((max_rows,), -1, dtype=torch.int64)  # slots
        self._states = computations.cache.states
        self._state_rows = torch.zeros(max_rows, dtype=torch.int64)
        self._starts = torch.zeros(max_rows + 1, dtype=torch.int64)
        # Takes no memory until it is written.
        self._blocks = torch.zeros(max_rows, computations.max_blocks, dtype=torch.int64)
        # Inputs of layers without a window; a second copy only where other layers have one.
        several = len(set(computations.windows)) > 1
        self._narrow = (torch.zeros_like(self._lengths), torch.zeros_like(self._blocks)) if several else None

    def serves(self, batch: StepBatch) -> bool:
        """Whether `forward` can replay or capture this step."""
        n = len(batch.token_ids)
        if n > self._max_rows or self._gave_up:
            return False
        if n != batch.n_sequences and batch.chooses:
            return False
        # A state that a step advances twice is advanced in turn.
        if self._states is not None and len({segment.row for segment in batch.segments}) != n:
            return False
        return n <= _MAX_CAPTURED or self._graph is not None

    def forward(self, x: torch.Tensor, batch: StepBatch) -> torch.Tensor:
        """Compute the rows `x` [n, hidden_size]."""
        n, n_sequences = len(x), batch.n_sequences
        self._x[:n], self._positions[:n], self._kv_slots[:n] = x, batch.positions, batch.kv_slots
        if batch.adapters is not None:
            self._adapters[:n] = batch.adapters.slots
        self._starts[: n_sequences + 1] = long_tensor(batch.query_starts)
        if batch.narrowed is not None and batch.narrowed.pages:
            self._pages[:n_sequences] = long_tensor(batch.narrowed.pages)
        alone = self._narrow is None and self._computations.windows[0] is None
        _fill(batch.narrow() if alone else batch, self._lengths, self._blocks)
        if self._narrow is not None:
            _fill(batch.narrow(), *self._narrow)
        sizes = StepSizes(n, n_sequences)
        if self._states is not None:
            self._state_rows[:n] = long_tensor([segment.row for segment in batch.segments])
        if self._graph is None:
            hidden = self._capture(batch, sizes)
        else:
            hidden = self._graph.replay(sizes, self._reduce, self._collectives)
        if self._states is not None:
            self._states.save(batch.segments)
        return hidden

    def _capture(self, batch: StepBatch, sizes: StepSizes) -> torch.Tensor:
        n, n_sequences = sizes
        capture = GraphCapture(self._kernels, self._reduce, sizes)
        positions = self._positions[:n]
        starts = self._starts[: n_sequences + 1]
        own = (starts, self._lengths[:n_sequences], self._blocks[:n_sequences])
        narrow = own
        if self._narrow is not None:
            lengths, blocks = self._narrow
            narrow = (starts, lengths[:n_sequences], blocks[:n_sequences])
        pages = self._pages[:n_sequences] if batch.chooses else None
        step = Step(
            batch=replace(batch, kv_slots=self._kv_slots[:n]),
            cache=self._computations.cache,
            rotations=tuple(rope(positions) for rope in self._computations.ropes),
            plans=tuple(
                KernelPlan(n, window, own) if window else KernelPlan(n, 0, narrow, pages)
                for window in self._computations.windows
            ),
            reduce=capture.reduce,
            adapters=AdapterRows(self._adapters[:n], ()) if batch.adapters is not None else None,
            states=None if self._states is None else StatePlan(n, n, self._state_rows[:n], (), ()),
        )
        with capture.noting():
            hidden = self._compute(self._x[:n], step)
        try:
            self._graph = capture.graph(self._max_rows, hidden)
        except NotReplayableError as reason:
            logger.info("steps are not replayed: %s", reason)
            self._gave_up = True
        return hidden


def _fill(batch: StepBatch, lengths: torch.Tensor, blocks: torch.Tensor) -> None:
    """Write the sequences' numbers of keys and their block tables; later entries are never used."""
    n_sequences, width = batch.block_tables.shape
    lengths[:n_sequences] = long_tensor(batch.context_lens)
    blocks[:n_sequences, :width] = batch.block_tables
