"""The tensors of one step, built once and shared by every layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """Rows of a step that adapters change; a row has at most one."""

    slots: torch.Tensor  # [n_rows] int64, the slot of each row's adapter; -1: none
    by_slot: tuple[tuple[int, torch.Tensor], ...]  # the slots in use, each with its rows [n] int64

    @classmethod
    def of(cls, slots: torch.Tensor) -> AdapterRows | None:
        """Return the rows with these `slots` [n_rows]; None if no row has an adapter."""
        used = [slot for slot in torch.unique(slots).tolist() if slot >= 0]
        if not used:
            return None
        return cls(slots, tuple((slot, torch.nonzero(slots == slot).squeeze(1)) for slot in used))


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

    @property
    def n_sequences(self) -> int:
        """Number of sequences in the step."""
        return len(self.context_lens)

    def device_lengths(self) -> torch.Tensor:
        """Return `context_lens` on the device, [n_sequences] int64."""
        if self.lengths is not None:
            return self.lengths
        return long_tensor(self.context_lens).to(self.block_tables.device, non_blocking=True)

    def rows_of(self, numbers: Sequence[int]) -> torch.Tensor:
        """Return `numbers` as an index on the device, [n] int64; the host does not wait for it."""
        return long_tensor(numbers).to(self.token_ids.device, non_blocking=True)

    def last_rows(self, sequences: Sequence[int]) -> tuple[torch.Tensor, StepBatch]:
        """Return the last row of each of `sequences`, [len(sequences)] int64, and a step of only these rows."""
        rows = self.rows_of([self.query_starts[i + 1] - 1 for i in sequences])
        step = StepBatch(
            token_ids=self.token_ids[rows],
            positions=self.positions[rows],
            kv_slots=self.kv_slots[rows],
            query_starts=tuple(range(len(sequences) + 1)),
            context_lens=tuple(self.context_lens[i] for i in sequences),
            block_tables=self.block_tables[self.rows_of(sequences)],
            n_decode=len(sequences),
            adapters=None if self.adapters is None else AdapterRows.of(self.adapters.slots[rows]),
        )
        return rows, step


def long_tensor(values: Sequence[int]) -> torch.Tensor:
    """Return `values` as int64 on the CPU; `torch.tensor` takes several times as long for dozens of values."""
    return torch.from_numpy(np.array(values, np.int64))
