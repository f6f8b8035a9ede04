"""Turns a plan's columns and the slot table into the numbers of a step, without a Python loop over rows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from services.compute.backends.batch import AdapterNumbers, StepNumbers
from services.worker.protocol.plan_codec import PlanView
from services.worker.rank.slot_table import SlotTable

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class DrawingRows:
    """Rows that draw a token each; rows of a sequence are in order."""

    slots: Ints  # [n_draws]
    positions: Ints  # [n_draws], positions of the drawn tokens
    rows: Ints  # [n_draws], indices of the step's rows


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """The step's sequences in batch order: sequences with one row come first."""

    slots: Ints  # [n_sequences]
    starts: Ints  # [n_sequences], position of the first row
    ends: Ints  # [n_sequences], position after the last row
    row_ends: Ints  # [n_sequences], index after the last row
    n_draws: NDArray[np.int32]  # [n_sequences], number of last rows that draw

    def drawing(self, sequences: Ints) -> DrawingRows:
        """Return the rows of `sequences` that draw."""
        counts = self.n_draws[sequences]
        if counts.max(initial=0) <= 1:  # most steps
            return DrawingRows(self.slots[sequences], self.ends[sequences], self.row_ends[sequences] - 1)
        before_last = np.repeat(np.cumsum(counts), counts) - np.arange(1, counts.sum() + 1)
        ends, row_ends = (np.repeat(values[sequences], counts) - before_last for values in (self.ends, self.row_ends))
        return DrawingRows(np.repeat(self.slots[sequences], counts), ends, row_ends - 1)


def lay_out(table: SlotTable, plan: PlanView) -> tuple[StepNumbers, BatchLayout]:
    """Lay out the chunks of `plan`, which must not be empty. Raises MalformedPlanError."""
    table.require_computable(plan, plan.starts + plan.n_tokens)
    slots, starts, n_sequences = plan.slots.astype(np.int64), plan.starts.astype(np.int64), len(plan.slots)
    if plan.n_tokens.max() == 1:  # only decodes: the most frequent and the shortest steps
        n_draws, n_decode, row_slots, positions = plan.n_draws, n_sequences, slots, starts
        ends, row_ends = starts + 1, np.arange(1, n_sequences + 1)
    else:
        order = np.argsort(plan.n_tokens > 1, kind="stable")
        slots, starts, n_draws = slots[order], starts[order], plan.n_draws[order]
        counts = plan.n_tokens[order].astype(np.int64)
        n_decode = int((counts == 1).sum())
        ends, row_ends = starts + counts, np.cumsum(counts)
        row_slots = np.repeat(slots, counts)
        positions = np.arange(row_ends[-1]) + np.repeat(starts - (row_ends - counts), counts)
    size = table.block_tokens
    blocks = table.block_tables[row_slots, positions // size]
    needed = -(-ends // size)
    tables = table.block_tables[slots, : needed.max()]  # a copy
    tables[np.arange(tables.shape[1]) >= needed[:, None]] = 0
    numbers = StepNumbers(
        token_ids=table.token_ids[row_slots, positions].astype(np.int64),
        positions=positions,
        kv_slots=blocks * size + positions % size,
        row_ends=row_ends,
        lengths=ends,
        block_tables=tables,
        n_decode=n_decode,
        token_types=table.token_types(row_slots, positions),
        adapters=AdapterNumbers.of(table.adapters[row_slots]) if table.adapters[slots].max() >= 0 else None,
    )
    return numbers, BatchLayout(slots, starts, ends, row_ends, n_draws)
