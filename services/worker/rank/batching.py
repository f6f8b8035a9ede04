"""Turns a plan's columns and the slot table into the numbers of a step, without a Python loop over rows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from services.compute.backends.batch import AdapterNumbers, StepNumbers
from services.compute.backends.states import StateRows
from services.worker.protocol.plan_codec import PlanView
from services.worker.rank.narrowing import block_tables, divide_generated, narrowed
from services.worker.rank.slot_table import SlotTable

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class DrawingRows:
    """Rows that draw a token each; rows of a slot follow each other, in order."""

    slots: Ints  # [n_rows]
    positions: Ints  # [n_rows], positions of the drawn tokens
    rows: Ints  # [n_rows], indices of the step's rows


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """The step's sequences in batch order: sequences with one row come first.

    A draft is a chunk with its slot's last token, so that the keys are read once for all its rows. Where such rows may
    differ from decodes in a bit, each is a sequence of its own over its slot's blocks: the device computes a draft as
    the decodes of as many requests, and replays what it has captured for these.
    """

    slots: Ints  # [n_sequences]
    starts: Ints  # [n_sequences], position of the first row
    ends: Ints  # [n_sequences], position after the last row
    row_ends: Ints  # [n_sequences], index after the last row
    draws: NDArray[np.int32]  # [n_sequences], number of last rows that draw

    def drawing(self, sequences: Ints) -> DrawingRows:
        """Return the rows of `sequences` that draw."""
        counts, slots = self.draws[sequences], self.slots[sequences]
        ends, row_ends = self.ends[sequences], self.row_ends[sequences]
        if counts.max(initial=0) <= 1:  # the most frequent and the shortest steps
            return DrawingRows(slots, ends, row_ends - 1)
        before_end = np.arange(counts.sum()) - np.repeat(np.cumsum(counts), counts)  # -count to -1 of each sequence
        slots, ends, row_ends = (np.repeat(of, counts) for of in (slots, ends, row_ends))
        return DrawingRows(slots, ends + before_end + 1, row_ends + before_end)


def lay_out(
    table: SlotTable, plan: PlanView, *, exact_chunks: bool, has_state: bool = False
) -> tuple[StepNumbers, BatchLayout]:
    """Lay out the chunks of `plan`, which must not be empty. Raises MalformedPlanError.

    `exact_chunks`: the rows of a chunk have the bits of decodes. `has_state`: layers keep a state for each slot.
    """
    table.require_computable(plan, plan.starts + plan.n_tokens)
    slots, starts, n_tokens, draws = _sequences(plan, exact_chunks=exact_chunks)
    narrows = bool(table.attention[slots].any())
    if narrows and n_tokens.max() > 1:
        slots, starts, n_tokens, draws = divide_generated(table, slots, starts, n_tokens, draws)
    if n_tokens.max() == 1:  # only decodes: the most frequent and the shortest steps
        n_decode, row_slots, positions = len(slots), slots, starts
        ends, row_ends = starts + 1, np.arange(1, n_decode + 1)
    else:
        order = np.argsort(n_tokens > 1, kind="stable")
        slots, starts, draws = slots[order], starts[order], draws[order]
        counts = n_tokens[order].astype(np.int64)
        n_decode = int((counts == 1).sum())
        ends, row_ends = starts + counts, np.cumsum(counts)
        row_slots = np.repeat(slots, counts)
        positions = np.arange(row_ends[-1]) + np.repeat(starts - (row_ends - counts), counts)
    size = table.block_tokens
    blocks = table.block_tables[row_slots, positions // size]
    numbers = StepNumbers(
        token_ids=table.token_ids[row_slots, positions].astype(np.int64),
        positions=positions,
        kv_slots=blocks * size + positions % size,
        row_ends=row_ends,
        lengths=ends,
        block_tables=block_tables(table, slots, ends),
        n_decode=n_decode,
        token_types=table.token_types(row_slots, positions),
        adapters=AdapterNumbers.of(table.adapters[row_slots]) if table.adapters[slots].max() >= 0 else None,
        narrowed=narrowed(table, slots, ends, ends - starts) if narrows else None,
        segments=_segments(slots, starts, ends, row_ends, plan.saves.astype(np.int64)) if has_state else (),
    )
    return numbers, BatchLayout(slots, starts, ends, row_ends, draws)


def _segments(slots: Ints, starts: Ints, ends: Ints, row_ends: Ints, saves: Ints) -> tuple[StateRows, ...]:
    """Return the sequences' rows and the rows of their states, which are their slots; pieces of a slot in order.

    `saves` [n, 3]: slots, positions and rows of copies; a sequence is divided after each.
    """
    order = np.argsort(starts, kind="stable") if len(np.unique(slots)) < len(slots) else slice(None)
    columns = [column[order].tolist() for column in (row_ends, slots, starts, ends)]
    segments = []
    for row_end, slot, start, end in zip(*columns, strict=True):
        inside = [(at, row) for of, at, row in saves.tolist() if of == slot and start < at <= end]
        first, before = row_end - end, start
        for at, row in sorted(inside):
            segments.append(StateRows(first + before, first + at, slot, before == 0, row))
            before = at
        if before < end:
            segments.append(StateRows(first + before, first + end, slot, before == 0))
    return tuple(segments)


def _sequences(plan: PlanView, *, exact_chunks: bool) -> tuple[Ints, Ints, NDArray[np.int32], NDArray[np.int32]]:
    """Return slot, start, number of rows and number of last rows that draw, of each sequence."""
    slots, starts = plan.slots.astype(np.int64), plan.starts.astype(np.int64)
    if not len(plan.proposals):
        return slots, starts, plan.n_tokens, plan.draws
    copies = plan.proposal_counts + 1
    if exact_chunks:
        return slots, starts, plan.n_tokens, plan.draws * copies
    first = np.repeat(np.cumsum(copies) - copies, copies)
    starts = np.repeat(starts, copies) + np.arange(len(first)) - first
    n_tokens = np.repeat(np.where(copies > 1, 1, plan.n_tokens), copies)
    return np.repeat(slots, copies), starts, n_tokens, np.repeat(plan.draws, copies)
