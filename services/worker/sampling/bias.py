"""Logit bias, and the ban on ending before `min_tokens`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.worker.sampling.slots import SlotParams
from services.worker.scheduling.plan import SamplingParams


@dataclass(frozen=True, slots=True)
class _SlotBias:
    columns: Tensor  # [n_bias] int64, local
    values: Tensor  # [n_bias] float32
    end_columns: Tensor  # [n_end] int64, local


class Biases:
    """The biases of the slots that have any, in this rank's columns of the vocabulary."""

    def __init__(self, vocab_start: int, vocab_local: int, device: torch.device) -> None:
        self._start, self._width, self._device = vocab_start, vocab_local, device
        self._of: dict[int, _SlotBias] = {}

    def admit(self, slot: int, params: SamplingParams) -> None:
        """Prepare a new request's bias."""
        end = self._start + self._width
        mine = [(token - self._start, bias) for token, bias in params.logit_bias if self._start <= token < end]
        ends = [token - self._start for token in params.end_token_ids if self._start <= token < end]
        self._of[slot] = _SlotBias(
            torch.tensor([column for column, _ in mine], dtype=torch.int64, device=self._device),
            torch.tensor([bias for _, bias in mine], dtype=torch.float32, device=self._device),
            torch.tensor(ends, dtype=torch.int64, device=self._device),
        )

    def release(self, slot: int) -> None:
        """Forget a slot, if it had a bias."""
        self._of.pop(slot, None)

    def apply(self, logits: Tensor, row: int, slot: int, position: int, min_length: NDArray[np.int64]) -> None:
        """Change row `row` of `logits` [n, vocab_local] in place; `position` is the drawn token's."""
        bias = self._of[slot]
        logits[row].index_add_(0, bias.columns, bias.values)
        if position < min_length[slot]:
            logits[row, bias.end_columns] = -torch.inf


def needs_bias(params: SlotParams, slots: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the rows whose slots have a bias."""
    return np.flatnonzero(params.biased[slots])
