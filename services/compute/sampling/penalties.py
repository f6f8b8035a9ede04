"""Penalties for tokens that occurred already, as in the OpenAI API and the CTRL paper (arXiv:1909.05858).

Only slots with a penalty are counted, and only their distinct tokens: a few hundred numbers instead of a vocabulary of
a hundred thousand.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.compute.sampling.slots import SlotParams


class _Seen:
    """A request's distinct tokens in this rank's columns, and how often each was generated."""

    def __init__(self, in_prompt: NDArray[np.int64], generated: NDArray[np.int64]) -> None:
        distinct = np.unique(np.concatenate((in_prompt, generated)))
        self.size = len(distinct)
        self._columns = np.zeros(self.size + 64, np.int64)
        self._counts = np.zeros(self.size + 64, np.float32)
        self._columns[: self.size] = distinct
        np.add.at(self._counts, np.searchsorted(distinct, generated), 1)
        self._place = {column: place for place, column in enumerate(distinct.tolist())}

    def count(self, column: int) -> None:
        place = self._place.get(column)
        if place is None:
            if self.size == len(self._columns):
                self._columns = np.concatenate((self._columns, np.zeros_like(self._columns)))
                self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
            place = self._place[column] = self.size
            self._columns[place] = column
            self.size += 1
        self._counts[place] += 1

    @property
    def columns(self) -> NDArray[np.int64]:
        return self._columns[: self.size]

    @property
    def counts(self) -> NDArray[np.float32]:
        return self._counts[: self.size]


class TokenCounts:
    """Token counts of the penalised slots."""

    def __init__(self, vocab_start: int, vocab_local: int) -> None:
        self._start, self._width = vocab_start, vocab_local
        self._of: dict[int, _Seen] = {}

    def admit(self, slot: int, token_ids: NDArray[np.int32], n_prompt: int) -> None:
        """Count the known tokens of a new request."""
        self._of[slot] = _Seen(self._local(token_ids[:n_prompt]), self._local(token_ids[n_prompt:]))

    def release(self, slot: int) -> None:
        """Remove a slot's counts, if any."""
        self._of.pop(slot, None)

    def count(self, slots: list[int], token_ids: NDArray[np.int64]) -> None:
        """Count one drawn token for each of `slots`."""
        for slot, token in zip(slots, token_ids.tolist(), strict=True):
            if 0 <= token - self._start < self._width:
                self._of[slot].count(token - self._start)

    def penalise(self, logits: Tensor, rows: NDArray[np.int64], slots: NDArray[np.int64], params: SlotParams) -> None:
        """Apply the penalties of `slots` to their `rows` of `logits` [n, vocab_local], in place."""
        seen = [self._of[slot] for slot in slots.tolist()]
        sizes = [each.size for each in seen]
        row = _tensor(np.repeat(rows, sizes), logits)  # [total of sizes]
        column = _tensor(np.concatenate([each.columns for each in seen]), logits)
        counts = np.concatenate([each.counts for each in seen])
        repetition = _tensor(np.repeat(params.repetition[slots], sizes), logits)
        subtracted = np.repeat(params.frequency[slots], sizes) * counts
        subtracted += np.repeat(params.presence[slots], sizes) * (counts > 0)
        values = logits[row, column]
        values = torch.where(values > 0, values / repetition, values * repetition)
        logits[row, column] = values - _tensor(subtracted, logits)

    def _local(self, token_ids: NDArray[np.int32]) -> NDArray[np.int64]:
        local = token_ids.astype(np.int64) - self._start
        return local[(local >= 0) & (local < self._width)]


def _tensor(values: NDArray[np.int64] | NDArray[np.float32], like: Tensor) -> Tensor:
    return torch.from_numpy(values).to(like.device)
