"""One step: its numbers on the host, and its tensors, built once and shared by every layer."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from services.compute.backends.states import StateRows

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """Rows of a step that adapters change; a row has at most one."""

    slots: torch.Tensor  # [n_rows] int64, the slot of each row's adapter; -1: none
    by_slot: tuple[tuple[int, torch.Tensor], ...]  # the slots in use, each with its rows [n] int64
    numbers: AdapterNumbers | None = None  # the host's knowledge of the step's rows; None in a graph


@dataclass(frozen=True, slots=True)
class AdapterNumbers:
    """`AdapterRows` on the host: it decides which rows belong to which slot, so that no step asks the device."""

    slots: Ints  # [n_rows]; -1: none
    used: tuple[int, ...]
    counts: tuple[int, ...]  # rows of each slot in use
    order: Ints  # [sum(counts)], the rows with an adapter, by slot

    @classmethod
    def of(cls, slots: Ints) -> AdapterNumbers | None:
        """Return the rows with these `slots` [n_rows]; None if no row has an adapter."""
        used, counts = np.unique(slots, return_counts=True)
        n_bare = int(counts[0]) if used[0] < 0 else 0
        if n_bare == len(slots):
            return None
        first = 1 if n_bare else 0
        order = np.argsort(slots, kind="stable")[n_bare:]
        return cls(slots, tuple(used[first:].tolist()), tuple(counts[first:].tolist()), order)

    def on_device(self, slots: torch.Tensor, order: torch.Tensor) -> AdapterRows:
        """Return the rows, given `slots` and `order` on the device."""
        rows = torch.split(order, list(self.counts))
        return AdapterRows(slots, tuple(zip(self.used, rows, strict=True)), self)


@dataclass(frozen=True, slots=True)
class NarrowedKeys:
    """The keys of a step's sequences in layers without a window or chunks, where decodes attend to some keys only.

    A decode's table leaves out the blocks that it does not read; for all others it is the one of the step.
    """

    context_lens: tuple[int, ...]  # [n_sequences]
    block_tables: torch.Tensor  # [n_sequences, max_blocks] int64
    lengths: torch.Tensor | None = None  # [n_sequences] int64, `context_lens` on the device
    pages: tuple[int, ...] = ()  # [n_sequences] most blocks that each KV head reads, 0: all; (): all of every sequence


@dataclass(frozen=True, slots=True)
class NarrowedNumbers:
    """`NarrowedKeys` on the host."""

    lengths: Ints  # [n_sequences]
    block_tables: Ints  # [n_sequences, max_blocks]
    pages: tuple[int, ...] = ()

    def on_device(self, lengths: torch.Tensor, block_tables: torch.Tensor) -> NarrowedKeys:
        """Return the keys, given the arrays on the device."""
        return NarrowedKeys(tuple(self.lengths.tolist()), block_tables, lengths, self.pages)


@dataclass(frozen=True, slots=True)
class FrameRows:
    """The step's rows of a frame of an image."""

    sequence: int  # index of their sequence
    first: int  # their first row
    n_rows: int
    end: int  # position after the last row


@dataclass(frozen=True, slots=True)
class ImageRows:
    """Rows of a step that are parts of images; they have states of the vision tower in place of embeddings.

    States of some models are longer: the rest is added to these rows, `hidden_size` numbers after each first layer.
    """

    rows: torch.Tensor  # [n] int64
    states: torch.Tensor  # [n, (1 + n_deep) * hidden_size]
    frames: tuple[FrameRows, ...] = ()  # by frame; read by models whose frames' rows attend to each other


@dataclass(frozen=True, slots=True)
class StepBatch:
    """Concatenated rows of several sequences; sequence i owns rows [query_starts[i], query_starts[i + 1]).

    Sequences with one row (decode) come before sequences with several (prefill). `context_lens[i]` counts the
    keys of sequence i after this step's rows are written, so its rows have the positions
    [context_lens[i] - n_rows, context_lens[i]).
    """

    token_ids: torch.Tensor  # [n_tokens] int64
    positions: torch.Tensor  # [n_tokens] int64
    kv_slots: torch.Tensor  # [n_tokens] int64, block * block_tokens + offset: where each row's KV is written
    query_starts: tuple[int, ...]  # n_sequences + 1
    context_lens: tuple[int, ...]  # n_sequences
    block_tables: torch.Tensor  # [n_sequences, max_blocks] int64, 0 beyond a sequence's end
    n_decode: int  # the first n_decode sequences have exactly one row
    token_types: torch.Tensor | None = None  # [n_tokens] int64, 1 in the second of two texts; None: 0 everywhere
    adapters: AdapterRows | None = None  # None: no row has one
    lengths: torch.Tensor | None = None  # [n_sequences] int64, `context_lens` on the device; None: not there yet
    narrowed: NarrowedKeys | None = None  # None: every row attends to all keys
    segments: tuple[StateRows, ...] = ()  # all rows, in order, for layers with a state; (): the model has none
    images: ImageRows | None = None  # None: no row is part of one
    # Time, line and column of each row, [3, n_tokens] int64, for ropes that turn by them; None: `positions` are all.
    places: torch.Tensor | None = None
    pages: tuple[int, ...] = ()  # as in `NarrowedKeys`, of the narrowed step

    @property
    def chooses(self) -> bool:
        """Whether KV heads choose the blocks that a row of the step reads."""
        return bool(self.narrowed and self.narrowed.pages)

    @property
    def n_sequences(self) -> int:
        """Number of sequences in the step."""
        return len(self.context_lens)

    def device_lengths(self) -> torch.Tensor:
        """Return `context_lens` on the device, [n_sequences] int64."""
        if self.lengths is not None:
            return self.lengths
        return long_tensor(self.context_lens).to(self.block_tables.device, non_blocking=True)

    def narrow(self) -> StepBatch:
        """Return the step as layers without a window or chunks see it."""
        if (keys := self.narrowed) is None:
            return self
        return replace(
            self,
            context_lens=keys.context_lens,
            lengths=keys.lengths,
            block_tables=keys.block_tables,
            pages=keys.pages,
            narrowed=None,
        )

    def rows_of(self, numbers: Sequence[int] | Ints) -> torch.Tensor:
        """Return `numbers` as an index on the device, [n] int64; the host does not wait for it."""
        return long_tensor(numbers).to(self.token_ids.device, non_blocking=True)

    def alone(self, numbers: Sequence[int]) -> tuple[torch.Tensor, StepBatch]:
        """Return the rows with these numbers, [len(numbers)] int64, and a step in which each is a sequence of its own.

        It must be computed after the step's keys are written.
        """
        rows = self.rows_of(numbers)
        sequences = [bisect_right(self.query_starts, number) - 1 for number in numbers]
        to_end = [self.query_starts[i + 1] - 1 - number for i, number in zip(sequences, numbers, strict=True)]
        of_rows = self.rows_of(sequences)

        def lengths(of: Sequence[int]) -> tuple[int, ...]:
            return tuple(of[i] - rest for i, rest in zip(sequences, to_end, strict=True))

        def pages(of: Sequence[int]) -> tuple[int, ...]:
            return tuple(of[i] for i in sequences) if of else ()

        step = StepBatch(
            token_ids=self.token_ids[rows],
            positions=self.positions[rows],
            places=None if self.places is None else self.places[:, rows],
            kv_slots=self.kv_slots[rows],
            query_starts=tuple(range(len(numbers) + 1)),
            context_lens=lengths(self.context_lens),
            block_tables=self.block_tables[of_rows],
            n_decode=len(numbers),
            adapters=None if self.adapters is None else self._adapters_of(self.adapters, numbers, rows),
            narrowed=None
            if (keys := self.narrowed) is None
            else NarrowedKeys(lengths(keys.context_lens), keys.block_tables[of_rows], pages=pages(keys.pages)),
            pages=pages(self.pages),
        )
        return rows, step

    def _adapters_of(self, adapters: AdapterRows, numbers: Sequence[int], rows: torch.Tensor) -> AdapterRows | None:
        """Return the adapters of the rows with these `numbers`."""
        assert adapters.numbers is not None, "a graph computes all rows of a step"
        chosen = AdapterNumbers.of(adapters.numbers.slots[list(numbers)])
        return None if chosen is None else chosen.on_device(adapters.slots[rows], self.rows_of(chosen.order))


@dataclass(frozen=True, slots=True)
class StepNumbers:
    """A step on the host: `StepBatch` before its tensors are on the device, with the same order of rows."""

    token_ids: Ints  # [n_tokens]; -1 - slot: the token that is drawn last for this slot, which the device knows
    positions: Ints  # [n_tokens]
    kv_slots: Ints  # [n_tokens]
    row_ends: Ints  # [n_sequences], index after the last row
    lengths: Ints  # [n_sequences], keys after this step
    block_tables: Ints  # [n_sequences, max_blocks]
    n_decode: int
    token_types: Ints | None = None  # [n_tokens]
    adapters: AdapterNumbers | None = None
    narrowed: NarrowedNumbers | None = None
    segments: tuple[StateRows, ...] = ()
    images: ImageRows | None = None  # on the device already
    places: Ints | None = None  # [3, n_tokens]

    def arrays(self) -> list[Ints]:
        """Return what goes to the device."""
        arrays = [self.token_ids, self.positions, self.kv_slots, self.lengths, self.block_tables]
        if self.token_types is not None:
            arrays.append(self.token_types)
        if self.adapters is not None:
            arrays += [self.adapters.slots, self.adapters.order]
        if self.narrowed is not None:
            arrays += [self.narrowed.lengths, self.narrowed.block_tables]
        if self.places is not None:
            arrays.append(self.places)
        return arrays

    def batch(self, tensors: Sequence[torch.Tensor]) -> StepBatch:
        """Return the step, given its `arrays` on the device."""
        token_ids, positions, kv_slots, lengths, block_tables, *rest = tensors
        others = iter(rest)
        return StepBatch(
            token_ids=token_ids,
            positions=positions,
            kv_slots=kv_slots,
            query_starts=(0, *self.row_ends.tolist()),
            context_lens=tuple(self.lengths.tolist()),
            block_tables=block_tables,
            n_decode=self.n_decode,
            token_types=next(others) if self.token_types is not None else None,
            adapters=self.adapters.on_device(next(others), next(others)) if self.adapters is not None else None,
            lengths=lengths,
            narrowed=self.narrowed.on_device(next(others), next(others)) if self.narrowed is not None else None,
            segments=self.segments,
            images=self.images,
            places=next(others) if self.places is not None else None,
        )


def long_tensor(values: Sequence[int] | Ints) -> torch.Tensor:
    """Return `values` as int64 on the CPU; `torch.tensor` takes several times as long for dozens of values."""
    return torch.from_numpy(np.array(values, np.int64))
