"""Decode steps as CUDA graphs: captured once for a number of rows and keys, then launched as a whole.

Without a graph Python launches some thirty kernels per layer one by one, more slowly than a GPU runs them.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from services.worker.backends.base import Computations, Step
from services.worker.backends.batch import AdapterRows, StepBatch

logger = logging.getLogger(__name__)

MAX_ROWS = 256
_MIN_KEYS = 256
_MAX_KEYS = 1 << 19  # keys of all rows; with more, attention takes so long that launches do not matter


class ReplayableAttention(Protocol):
    """An attention whose decodes can be laid out on the device without the host."""

    def decode_plan(
        self, lengths: Tensor, block_tables: Tensor, n_keys: int, block_tokens: int, window: int | None
    ) -> Any:
        """Return the plan of n rows with `lengths` [n] keys, at most `n_keys`, in `block_tables` [n, max_blocks]."""
        ...


@dataclass(frozen=True, slots=True)
class Sizes:
    """Size of a graph; steps with fewer rows or keys are padded to it."""

    n_rows: int
    n_keys: int  # keys of the longest sequence

    @classmethod
    def of(cls, batch: StepBatch) -> Sizes:
        """Return the next powers of two."""
        return cls(_power_of_two(batch.n_sequences), max(_MIN_KEYS, _power_of_two(max(batch.context_lens))))


@dataclass(frozen=True, slots=True)
class CapturedStep:
    """A graph and its output."""

    graph: torch.cuda.CUDAGraph
    hidden: Tensor  # [n_rows, hidden_size]


class CudaDecodes:
    """Replays `decode` for steps of one row per sequence, all with adapters in some rows or all without any.

    Serves no more steps once a step has needed the host.
    """

    def __init__(
        self, computations: Computations, attention: ReplayableAttention, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._computations, self._attention, self._device = computations, attention, device
        self._captured: dict[Sizes, CapturedStep] = {}
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()  # shared by all graphs, because only one runs at a time
        self._gave_up = False
        # The inputs that change from step to step, always at the same addresses.
        self._x = torch.zeros(MAX_ROWS, computations.hidden_size, dtype=dtype, device=device)
        numbers = torch.zeros(4, MAX_ROWS, dtype=torch.int64, device=device)
        self._positions, self._kv_slots, self._lengths, self._adapters = numbers
        self._blocks = torch.zeros(MAX_ROWS, computations.max_blocks, dtype=torch.int64, device=device)

    def serves(self, batch: StepBatch) -> bool:
        """Whether `forward` can replay or capture this step."""
        if self._gave_up or batch.n_sequences > MAX_ROWS:
            return False
        sizes = Sizes.of(batch)
        return sizes.n_rows * sizes.n_keys <= _MAX_KEYS

    def forward(self, x: Tensor, batch: StepBatch) -> Tensor:
        """Compute the rows `x` [n, hidden_size]."""
        sizes = Sizes.of(batch)
        self._fill(x, batch, sizes.n_rows)
        captured = self._captured.get(sizes)
        if captured is None:
            probed = self._probe(batch, sizes)
            if self._gave_up:
                return probed[: len(x)]
            captured = self._captured[sizes] = self._capture(batch, sizes)
        captured.graph.replay()
        return captured.hidden[: len(x)]

    def _fill(self, x: Tensor, batch: StepBatch, n_rows: int) -> None:
        """Copy the step's inputs to the graphs' addresses. Padding repeats the last row and writes the same values."""
        rows = torch.arange(n_rows, device=self._device).clamp_(max=len(x) - 1)
        torch.index_select(x, 0, rows, out=self._x[:n_rows])
        torch.index_select(batch.positions, 0, rows, out=self._positions[:n_rows])
        torch.index_select(batch.kv_slots, 0, rows, out=self._kv_slots[:n_rows])
        torch.index_select(batch.device_lengths(), 0, rows, out=self._lengths[:n_rows])
        if batch.adapters is not None:
            torch.index_select(batch.adapters.slots, 0, rows, out=self._adapters[:n_rows])
        width = batch.block_tables.shape[1]
        self._blocks[:n_rows, :width] = batch.block_tables.index_select(0, rows)  # later entries are never used

    def _compute(self, x: Tensor, batch: StepBatch, sizes: Sizes) -> Tensor:
        given, n = self._computations, sizes.n_rows
        lengths, blocks, size = self._lengths[:n], self._blocks[:n], given.cache.block_tokens
        positions = self._positions[:n]
        step = Step(
            batch=StepBatch(
                token_ids=batch.token_ids,  # embedded already
                positions=positions,
                kv_slots=self._kv_slots[:n],
                query_starts=tuple(range(n + 1)),
                context_lens=(sizes.n_keys,) * n,
                block_tables=blocks,
                n_decode=n,
            ),
            cache=given.cache,
            rotations=tuple(rope(positions) for rope in given.ropes),
            plans=tuple(
                self._attention.decode_plan(lengths, blocks, sizes.n_keys, size, window) for window in given.windows
            ),
            reduce=given.comm.all_reduce,
            adapters=AdapterRows(self._adapters[:n], ()) if given.adapted else None,
        )
        return given.decode(x, step)

    def _probe(self, batch: StepBatch, sizes: Sizes) -> Tensor:
        """Compute the step once without a capture, to load its kernels and to detect whether it needs the host."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            try:
                with _no_word_from_the_host():
                    hidden = self._compute(self._x[: sizes.n_rows].clone(), batch, sizes)
            except RuntimeError as error:
                logger.info("steps are not replayed: %s", error)
                self._gave_up = True
                hidden = self._compute(self._x[: sizes.n_rows].clone(), batch, sizes)
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        return hidden

    def _capture(self, batch: StepBatch, sizes: Sizes) -> CapturedStep:
        graph = torch.cuda.CUDAGraph()
        capturing = torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local")
        with _garbage_kept(), capturing:
            hidden = self._compute(self._x[: sizes.n_rows], batch, sizes)
        return CapturedStep(graph, hidden)


@contextmanager
def _no_word_from_the_host() -> Iterator[None]:
    """Make operations that wait for the device raise RuntimeError."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@contextmanager
def _garbage_kept() -> Iterator[None]:
    """Disable the garbage collector: destroying another model's graph would end a capture."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()
