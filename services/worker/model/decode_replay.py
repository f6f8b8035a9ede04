"""Decode steps replayed: recorded once for each number of sequences, then run without Python between the kernels."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

import torch

from services.worker.kernels.bfloat16 import Bfloat16Kernels
from services.worker.kernels.recording import Program, Recorder, Recording
from services.worker.model.attention_kernels import KernelPlan
from services.worker.model.attention_layer import Step
from services.worker.model.batch import StepBatch
from services.worker.model.kv_cache import KvCache
from services.worker.model.rope import RotaryTables
from services.worker.parallel.communicator import Communicator

logger = logging.getLogger(__name__)

MAX_ROWS = 64  # with more, the kernels take so long that what is between them does not matter

# Computes a step's embedded rows [n, hidden_size], which it may overwrite: returns the same rows, final norm applied.
Compute = Callable[[torch.Tensor, Step], torch.Tensor]


class DecodeReplay:
    """Computes steps with one row per sequence, in one cache. What it returns lasts until the next step.

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
    ) -> None:
        self.cache = cache
        self._compute, self._kernels, self._comm, self._ropes, self._windows = compute, kernels, comm, ropes, windows
        self._programs: dict[int, Program] = {}  # by number of sequences
        self._recordings: list[Recording] = []
        self._arena = torch.empty(0, dtype=torch.uint8)
        self._gave_up = False
        # What changes from step to step, always in the same place.
        self._x = torch.empty(MAX_ROWS, hidden_size, dtype=torch.bfloat16)
        self._positions, self._kv_slots, self._lengths = torch.zeros(3, MAX_ROWS, dtype=torch.int64)
        self._starts = torch.arange(MAX_ROWS + 1)
        self._blocks = torch.zeros(MAX_ROWS, 0, dtype=torch.int64)

    def serves(self, batch: StepBatch) -> bool:
        """Whether the step is one of those that are replayed."""
        n = len(batch.token_ids)
        return n == batch.n_sequences and n <= MAX_ROWS and not self._gave_up

    def forward(self, x: torch.Tensor, batch: StepBatch) -> torch.Tensor:
        """Compute the embedded rows `x` [n, hidden_size]."""
        n, width = batch.block_tables.shape
        if width > self._blocks.shape[1]:
            self._widen(width)
        self._x[:n], self._positions[:n], self._kv_slots[:n] = x, batch.positions, batch.kv_slots
        self._lengths[:n] = torch.tensor(batch.context_lens)
        self._blocks[:n, :width] = batch.block_tables  # beyond them no key is read that counts
        program = self._programs.get(n) or self._derive(n)
        return program.run(self._comm.all_reduce, self._comm.collectives) if program else self._record(batch)

    def _widen(self, width: int) -> None:
        """Make room for longer sequences; programs that were recorded for shorter ones name another place."""
        self._programs.clear()
        self._recordings.clear()
        self._blocks = torch.zeros(MAX_ROWS, 2 * width, dtype=torch.int64)

    def _derive(self, n: int) -> Program | None:
        """The program for another number of sequences than those that were recorded lately."""
        if len(self._recordings) < 2:
            return None
        recording = self._recordings[-2].of_rows(n, self._recordings[-1])
        if recording is not None:
            self._programs[n] = recording.program(self._kernels)
        return self._programs.get(n)

    def _record(self, batch: StepBatch) -> torch.Tensor:
        n = batch.n_sequences
        recorder = Recorder(self._kernels, self._comm.all_reduce)
        positions, sequences = self._positions[:n], (self._starts[: n + 1], self._lengths[:n], self._blocks[:n])
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
            logger.info("decode steps are not replayed: they need %s", ", ".join(sorted(recorder.foreign)))
            self._gave_up = True
        else:
            recording = recorder.recording(n, MAX_ROWS, hidden, self._arena)
            self._arena = recording.arena
            self._recordings.append(recording)
            self._programs[n] = recording.program(self._kernels)
        return hidden
