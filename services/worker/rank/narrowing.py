"""Decodes that attend to some keys only: which rows these are, and the blocks that they read.

A token's attention follows from its position alone: tokens of the prompt attend to all keys, generated tokens as their
request says. So a text has the same bits where it was interrupted: its generated tokens are computed again as decodes.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from services.compute.backends.batch import NarrowedNumbers
from services.worker.rank.slot_table import SlotTable

Ints = NDArray[np.int64]
Sequences = tuple[Ints, Ints, NDArray[np.int32], NDArray[np.int32]]


def divide_generated(
    table: SlotTable, slots: Ints, starts: Ints, n_tokens: NDArray[np.int32], draws: NDArray[np.int32]
) -> Sequences:
    """Return the sequences with each generated token of slots that are not dense in a sequence of its own.

    `draws` [n_sequences] counts the last rows that draw.
    """
    narrows = table.attention[slots].any(1)
    first = np.where(narrows, np.clip(table.n_prompt[slots] - starts, 0, n_tokens), n_tokens)  # rows that stay together
    pieces = n_tokens - first + (first > 0)
    of = np.repeat(np.arange(len(slots)), pieces)
    piece = np.arange(len(of)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    leads = (piece == 0) & (first[of] > 0)
    offset = np.where(first[of] > 0, np.maximum(first[of] + piece - 1, 0), piece)
    offset[leads] = 0
    rows = np.where(leads, first[of], 1)
    after = n_tokens[of] - offset - rows
    drawing = np.clip(draws[of] - after, 0, rows)
    return slots[of], starts[of] + offset, rows.astype(np.int32), drawing.astype(np.int32)


def block_tables(table: SlotTable, slots: Ints, ends: Ints) -> Ints:
    """Return the blocks of sequences with `ends` [n] keys: [n, max_blocks], 0 beyond a sequence's end."""
    needed = -(-ends // table.block_tokens)
    tables = table.block_tables[slots, : needed.max()]  # a copy
    tables[np.arange(tables.shape[1]) >= needed[:, None]] = 0
    return tables


def narrowed(table: SlotTable, slots: Ints, ends: Ints, n_rows: Ints) -> NarrowedNumbers | None:
    """Return the keys of sequences with `ends` [n] keys and `n_rows` [n] rows; None if all rows attend to all keys."""
    sinks, window, pages = table.attention[slots].T
    size = table.block_tokens
    n_first = -(-sinks // size)  # blocks
    decodes = (n_rows == 1) & (ends > table.n_prompt[slots])
    dropped = np.where(decodes & (window > 0), np.maximum((ends - window) // size - n_first, 0), 0)  # blocks
    chosen = np.where(decodes & (-(-ends // size) > pages), pages, 0)
    if not (dropped.any() or chosen.any()):
        return None
    lengths = ends - dropped * size
    needed = -(-lengths // size)
    column = np.arange(needed.max())
    source = column + np.where(column >= n_first[:, None], dropped[:, None], 0)
    inside = column < needed[:, None]
    tables = table.block_tables[slots[:, None], np.where(inside, source, 0)]
    tables[~inside] = 0
    return NarrowedNumbers(lengths, tables, tuple(chosen.tolist()) if chosen.any() else ())
