"""Decodes as CUDA graphs, from the ids of tokens to the tokens that are drawn.

A graph is captured once for a number of rows and keys, then launched as a whole. Before a launch its numbers are
uploaded to where it reads them, by one copy; after it the tokens are copied to the host, if any were drawn. Without a
graph Python launches some thirty kernels per layer one by one, more slowly than a GPU runs them.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from services.compute.backends.base import Computations, Step
from services.compute.backends.batch import AdapterRows, StepBatch, StepNumbers
from services.compute.backends.cuda.recorder import Recorder, Recording
from services.compute.backends.cuda.small import power_of_two
from services.compute.backends.cuda.transfers import BufferLayout
from services.compute.backends.decodes import Tokens
from services.compute.backends.draws import Chances, DrawNumbers, DrawRows
from services.compute.backends.states import StatePlan, segment_table
from services.compute.backends.transfers import Numbers

logger = logging.getLogger(__name__)

MAX_ROWS = 256
_MIN_KEYS = 256
_MAX_KEYS = 1 << 19  # keys of all rows; with more, attention takes so long that launches do not matter


@runtime_checkable
class ReplayableAttention(Protocol):
    """An attention whose decodes can be laid out on the device without the host."""

    def decode_plan(
        self, lengths: Tensor, block_tables: Tensor, n_keys: int, block_tokens: int, window: int | None
    ) -> Any:
        """Return the plan of n rows with `lengths` [n] keys, at most `n_keys`, in `block_tables` [n, max_blocks]."""


class Uploads(Protocol):
    """Copies to places on the device that do not change."""

    def up_to(self, arrays: Sequence[Numbers], place: Tensor) -> None:
        """Copy the arrays to `place`, uint8, as their `BufferLayout` says; the host does not wait."""


@dataclass(frozen=True, slots=True)
class GraphSizes:
    """The size of a graph; steps with fewer rows or keys are padded to it."""

    n_rows: int
    n_keys: int  # keys of the longest sequence
    adapted: bool = False  # rows may have adapters: steps without any pay nothing for them
    draws: bool = False
    narrowed: bool = False  # layers without a window have keys of their own

    @classmethod
    def of(cls, numbers: StepNumbers, *, draws: bool) -> GraphSizes:
        """Return the next powers of two."""
        n_keys = max(_MIN_KEYS, power_of_two(int(numbers.lengths.max())))
        adapted, narrowed = numbers.adapters is not None, numbers.narrowed is not None
        return cls(power_of_two(len(numbers.lengths)), n_keys, adapted, draws, narrowed)


@dataclass(frozen=True, slots=True)
class CapturedStep:
    """A graph, and the place that it reads its numbers from."""

    inputs: Tensor  # uint8
    recording: Recording


class CudaDecodes:
    """Replays decodes. Serves no more steps once a step has needed the host."""

    def __init__(
        self,
        computations: Computations,
        attention: ReplayableAttention | None,
        tokens: Tokens | None,
        uploads: Uploads,
        recorder: Recorder,
        device: torch.device,
        *,
        adapters: bool,
    ) -> None:
        """`attention`, `tokens`: None if no layer attends, and if nothing is drawn on the device.

        `adapters`: whether graphs can hold their products.
        """
        self._computations, self._attention, self._tokens = computations, attention, tokens
        self._uploads, self._recorder, self._device, self._adapters = uploads, recorder, device, adapters
        self._captured: dict[GraphSizes, CapturedStep] = {}
        self._gave_up = False

    def serves(self, numbers: StepNumbers) -> bool:
        """Whether `forward` can replay or capture this step."""
        n, longest = len(numbers.lengths), self._computations.longest
        if self._gave_up or n != len(numbers.token_ids) or n > MAX_ROWS:
            return False
        if self._computations.cache.states is not None and len({one.row for one in numbers.segments}) != n:
            return False  # a state that a step advances twice is advanced in turn
        if numbers.adapters is not None and not self._adapters:
            return False
        if numbers.narrowed is not None and numbers.narrowed.pages:
            return False
        if longest is not None and numbers.lengths.max() > longest:
            return False
        sizes = GraphSizes.of(numbers, draws=False)
        return sizes.n_rows * sizes.n_keys <= _MAX_KEYS

    def forward(self, numbers: StepNumbers, drawn: DrawNumbers | None) -> Tensor:
        """Compute a step, and draw its tokens."""
        n, sizes = len(numbers.lengths), GraphSizes.of(numbers, draws=drawn is not None)
        arrays = self._padded(numbers, drawn, sizes)
        captured, states = self._captured.get(sizes), self._computations.cache.states
        if states is not None:
            states.begin(numbers.segments)
        if captured is None:
            return self._first(arrays, sizes)[:n]
        self._uploads.up_to(arrays, captured.inputs)
        captured.recording.replay()
        return captured.recording.output[:n]

    def _first(self, arrays: Sequence[Numbers], sizes: GraphSizes) -> Tensor:
        """Compute a step, and capture it for those that follow.

        It is computed once only: a step that draws replaces the tokens that it read, and states go on. With states, it
        is probed without effect before, since a step that needs the host in between begins again.
        """
        packing = BufferLayout.of(arrays)
        inputs = torch.empty(packing.size, dtype=torch.uint8, device=self._device)
        compute = partial(self._compute, packing.views(inputs), sizes)
        try:
            if self._computations.cache.states is not None:
                self._uploads.up_to(self._without_effect(arrays, sizes), inputs)
                self._recorder.probe(compute)
            self._uploads.up_to(arrays, inputs)
            computed = self._recorder.probe(compute)
        except RuntimeError as error:
            logger.info("steps are not replayed: %s", error)
            self._gave_up = True
            self._uploads.up_to(arrays, inputs)
            return compute()
        self._captured[sizes] = CapturedStep(inputs, self._recorder.record(compute))
        return computed

    def _padded(self, numbers: StepNumbers, drawn: DrawNumbers | None, sizes: GraphSizes) -> list[Numbers]:
        """Return what `_compute` reads. Padding repeats the last row: it writes the same values, and a spare token.

        In models with states it has none: its values are others, and its keys go to the null block.
        """
        has_states = self._computations.cache.states is not None
        columns: list[Numbers] = [numbers.token_ids, numbers.positions, numbers.kv_slots, numbers.lengths]
        if numbers.adapters is not None:
            columns.append(numbers.adapters.slots)
        tables = [numbers.block_tables]
        if numbers.narrowed is not None:
            columns.append(numbers.narrowed.lengths)
            tables.append(numbers.narrowed.block_tables)
        missing, width = sizes.n_rows - len(numbers.lengths), -(-sizes.n_keys // self._computations.cache.block_tokens)
        arrays = [np.pad(table, ((0, 0), (0, width - table.shape[1]))) for table in tables]
        arrays = [np.concatenate((table, np.repeat(table[-1:], missing, 0))) for table in arrays]
        if has_states:
            arrays.append(np.concatenate((segment_table(numbers.segments), np.full((missing, 4), -1))))
        no_keys = numbers.kv_slots if has_states else None
        arrays += [_extended(column, 0 if column is no_keys else column[-1], missing) for column in columns]
        if drawn is not None:
            assert self._tokens is not None
            arrays.append(_extended(drawn.slots, self._tokens.spare, missing))
            arrays += [_extended(column, column[-1], missing) for column in (drawn.temperature, drawn.seeds)]
        return arrays

    def _without_effect(self, arrays: Sequence[Numbers], sizes: GraphSizes) -> list[Numbers]:
        """Return what `_padded` does for rows that are all padding."""
        blank, place = list(arrays), 1 + sizes.narrowed
        blank[place] = np.full_like(arrays[place], -1)
        blank[place + 3] = np.zeros_like(arrays[place + 3])  # slots of keys
        if sizes.draws:
            assert self._tokens is not None
            blank[-3] = np.full_like(arrays[-3], self._tokens.spare)  # slots of tokens
        return blank

    def _compute(self, inputs: Sequence[Tensor], sizes: GraphSizes) -> Tensor:
        """Compute the step whose numbers are `inputs`, in the order of `_padded`."""
        given, n, attention = self._computations, sizes.n_rows, self._attention
        size = given.cache.block_tokens
        (tables, *narrow), columns = inputs[: 1 + sizes.narrowed], list(inputs[1 + sizes.narrowed :])
        segments = None if given.cache.states is None else columns.pop(0)
        token_ids, positions, kv_slots, lengths, *others = columns
        adapters = others.pop(0) if sizes.adapted else None
        narrow_lengths, narrow_tables = (others.pop(0), narrow[0]) if sizes.narrowed else (lengths, tables)
        if self._tokens is not None:
            token_ids = self._tokens.resolve(token_ids)
        step = Step(
            batch=StepBatch(
                token_ids=token_ids,
                positions=positions,
                kv_slots=kv_slots,
                query_starts=tuple(range(n + 1)),
                context_lens=(sizes.n_keys,) * n,
                block_tables=tables,
                n_decode=n,
            ),
            cache=given.cache,
            rotations=tuple(rope(positions) for rope in given.ropes),
            plans=()
            if attention is None
            else tuple(
                attention.decode_plan(lengths, tables, sizes.n_keys, size, window)
                if window
                else attention.decode_plan(narrow_lengths, narrow_tables, sizes.n_keys, size, None)
                for window in given.windows
            ),
            reduce=given.comm.all_reduce,
            adapters=None if adapters is None else AdapterRows(adapters, ()),
            states=None if segments is None else StatePlan.of_singles(segments),
        )
        hidden = given.decode(given.embed(token_ids, positions), step)
        if segments is not None and given.cache.layers:
            torch._foreach_zero_([layer[0] for layer in given.cache.layers])  # the null block
        if not sizes.draws:
            return hidden
        assert self._tokens is not None
        slots, temperature, seeds = others
        return self._tokens.draw(given.logits(hidden), DrawRows(slots, Chances(temperature, seeds, lengths)))


def _extended(column: Numbers, filling: Any, missing: int) -> Numbers:
    return np.concatenate((column, np.full(missing, filling, column.dtype))) if missing else column
