"""Logit bias, and the ban of end tokens before `min_tokens`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from ryzanstein.v1.worker_pb2 import Sampling
from torch import Tensor

from services.compute.sampling.slots import SlotParams


@dataclass(frozen=True, slots=True)
class _SlotBias:
    columns: NDArray[np.int64]  # [n_bias], local, distinct
    values: NDArray[np.float32]  # [n_bias]
    end_columns: NDArray[np.int64]  # [n_end], local


class Biases:
    """The slots' biases for this rank's columns of the vocabulary."""

    def __init__(self, vocab_start: int, vocab_local: int) -> None:
        self._start, self._width = vocab_start, vocab_local
        self._of: dict[int, _SlotBias] = {}

    def admit(self, slot: int, sampling: Sampling) -> None:
        """Store a new request's bias."""
        first, end = self._start, self._start + self._width
        biases = {token - first: bias for token, bias in sampling.logit_bias.items() if first <= token < end}
        ends = [token - first for token in sampling.stop_token_ids if first <= token < end]
        self._of[slot] = _SlotBias(
            np.array(list(biases), np.int64), np.array(list(biases.values()), np.float32), np.array(ends, np.int64)
        )

    def release(self, slot: int) -> None:
        """Remove a slot's bias, if any."""
        self._of.pop(slot, None)

    def apply(
        self, logits: Tensor, rows: NDArray[np.int64], slots: NDArray[np.int64], early: NDArray[np.bool_]
    ) -> None:
        """Add the biases to `rows` of `logits` [n, vocab_local] in place and ban end tokens where `early` is set.

        `rows`, `slots` and `early` have one entry per biased row.
        """
        biases = [self._of[slot] for slot in slots.tolist()]
        at = _cells(rows, [each.columns for each in biases], logits)
        if at is not None:
            logits[at] += torch.from_numpy(np.concatenate([each.values for each in biases])).to(logits.device)
        ending = [each.end_columns for each, banned in zip(biases, early.tolist(), strict=True) if banned]
        at = _cells(rows[early], ending, logits)
        if at is not None:
            logits[at] = -torch.inf


def needs_bias(params: SlotParams, slots: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the rows whose slots have a bias."""
    return np.flatnonzero(params.biased[slots])


def _cells(rows: NDArray[np.int64], columns: list[NDArray[np.int64]], logits: Tensor) -> tuple[Tensor, Tensor] | None:
    """Index of the `columns` of each row; None if there are no columns."""
    sizes = [len(each) for each in columns]
    if not any(sizes):
        return None
    row, column = np.repeat(rows, sizes), np.concatenate(columns)
    return torch.from_numpy(row).to(logits.device), torch.from_numpy(column).to(logits.device)
