"""Steps replayed: recorded for a few sizes, then run for any without Python between the kernels."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

import torch

from services.worker.kernels.bfloat16 import Bfloat16Kernels
from services.worker.kernels.recording import Growth, Program, Recorder, Recording, Sizes
from services.worker.model.attention_kernels import KernelPlan
from services.worker.model.attention_layer import Step
from services.worker.model.batch import StepBatch, long_tensor
from services.worker.model.kv_cache import KvCache
from services.worker.model.rope import RotaryTables
from services.worker.parallel.communicator import Communicator

logger = logging.getLogger(__name__)

_MAX_RECORDED = 64  # rows: while a step is recorded, all that its layers make is kept
_MAX_PROGRAMS = 256  # kept; another one is quickly derived

# Computes a step's rows [n, hidden_size], which it may overwrite; returns as many.
Compute = Callable[[torch.Tensor, Step], torch.Tensor]


class StepReplay:
    """Does what `compute` does for up to `max_rows` rows, in one cache. What it returns lasts until the next step.

    Gives up for good when a step turns out to need more than our kernels.
    """

    def __init__(
        self,
        compute: Compute,
        kernels: Bfloat16Kernels,
        comm: Communicator,
        ropes: tuple[RotaryTables, ...],
        windows: tuple[int | None, ...],
        cache: KvCache,
        hidden_size: int,
        max_blocks: int,
        max_rows: int,
    ) -> None:
        """`max_blocks`: of a sequence."""
        self.cache, self.max_rows = cache, max_rows
        self._compute, self._kernels, self._comm, self._ropes, self._windows = compute, kernels, comm, ropes, windows
        self._programs: dict[Sizes, Program] = {}
        self._recordings: list[Recording] = []  # the last two
        self._growth: Growth | None = None  # between them
        self._arena = torch.empty(0, dtype=torch.uint8)
        self._gave_up = False
        # What changes from step to step, always in the same place. A sequence has at least one row.
        self._x = torch.empty(max_rows, hidden_size, dtype=torch.bfloat16)
        self._positions, self._kv_slots, self._lengths = torch.zeros(3, max_rows, dtype=torch.int64)
        self._starts = torch.zeros(max_rows + 1, dtype=torch.int64)
        self._blocks = torch.zeros(max_rows, max_blocks, dtype=torch.int64)  # takes no memory until it is written

    def serves(self, batch: StepBatch) -> bool:
        """Whether the step is one of those that are replayed, or recorded."""
        n = len(batch.token_ids)
        if n > self.max_rows or self._gave_up:
            return False
        return n <= _MAX_RECORDED or self._program(Sizes(n, batch.n_sequences)) is not None

    def forward(self, x: torch.Tensor, batch: StepBatch) -> torch.Tensor:
        """Compute the rows `x` [n, hidden_size]."""
        n, (n_sequences, width) = len(x), batch.block_tables.shape
        self._x[:n], self._positions[:n], self._kv_slots[:n] = x, batch.positions, batch.kv_slots
        self._starts[: n_sequences + 1] = long_tensor(batch.query_starts)
        self._lengths[:n_sequences] = long_tensor(batch.context_lens)
        self._blocks[:n_sequences, :width] = batch.block_tables  # beyond them no key is read that counts
        sizes = Sizes(n, n_sequences)
        program = self._program(sizes)
        return program.run(self._comm.all_reduce, self._comm.collectives) if program else self._record(batch, sizes)

    def _program(self, sizes: Sizes) -> Program | None:
        return self._programs.get(sizes) or self._derive(sizes)

    def _derive(self, sizes: Sizes) -> Program | None:
        """The program for other sizes than those that were recorded lately."""
        recording = self._growth.of_sizes(sizes) if self._growth else None
        return None if recording is None else self._keep(recording)

    def _keep(self, recording: Recording) -> Program:
        if len(self._programs) == _MAX_PROGRAMS:
            self._programs.clear()
        program = self._programs[recording.sizes] = recording.program(self._kernels)
        return program

    def _record(self, batch: StepBatch, sizes: Sizes) -> torch.Tensor:
        n, n_sequences = sizes
        recorder = Recorder(self._kernels, self._comm.all_reduce)
        positions = self._positions[:n]
        sequences = (self._starts[: n_sequences + 1], self._lengths[:n_sequences], self._blocks[:n_sequences])
        step = Step(
            batch=replace(batch, kv_slots=self._kv_slots[:n]),
            cache=self.cache,
            rotations=tuple(rope.at(positions) for rope in self._ropes),
            plans=tuple(KernelPlan(n, window or 0, sequences) for window in self._windows),
            reduce=recorder.reduce,
        )
        with recorder.noting():
            hidden = self._compute(self._x[:n], step)
        if recorder.foreign:
            logger.info("steps are not replayed: they need %s", ", ".join(sorted(recorder.foreign)))
            self._gave_up = True
        else:
            recording = recorder.recording(sizes, self.max_rows, hidden, self._arena)
            self._arena = recording.arena
            self._recordings = [*self._recordings[-1:], recording]
            self._growth = Growth.between(*self._recordings) if len(self._recordings) == 2 else None
            self._keep(recording)
        return hidden
