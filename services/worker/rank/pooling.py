"""Pooled embeddings of prompts that may be computed in several chunks."""

from __future__ import annotations

import torch
from torch import Tensor

from services.compute.model.layers.head import Head
from services.compute.model.loading.pooling import Pooling


class PooledSlots:
    """The pooled hidden states of the slots that embed."""

    def __init__(self, pooling: Pooling, head: Head = ()) -> None:
        """`head`: layers over a pooled state, before it is scaled."""
        self._pooling, self._head = pooling, head
        self._kept: dict[int, Tensor] = {}  # [hidden_size] float32: the sum so far, the first or the last state
        self._counts: dict[int, int] = {}

    def admit(self, slot: int) -> None:
        """Start pooling a slot."""
        self._kept.pop(slot, None)
        self._counts[slot] = 0

    def release(self, slot: int) -> None:
        """Remove a slot's state, if it was pooled."""
        self._counts.pop(slot, None)
        self._kept.pop(slot, None)

    def any(self) -> bool:
        """Whether any slot is pooled."""
        return bool(self._counts)

    def holds(self, slot: int) -> bool:
        """Whether the slot is pooled."""
        return slot in self._counts

    def add(self, slot: int, start: int, hidden: Tensor) -> None:
        """Add the hidden states [n, hidden_size] of the positions from `start` on."""
        if start != self._counts[slot]:
            raise ValueError(
                f"slot {slot} is pooled: its chunk starts at {start} but {self._counts[slot]} positions were summed; "
                "pooled requests must compute every position once, without prefix hits"
            )
        state = self._kept.get(slot)
        if self._pooling.kind == "mean":
            total = hidden.float().sum(dim=0)
            self._kept[slot] = total if state is None else state + total
        elif self._pooling.kind == "last" or state is None:
            self._kept[slot] = hidden[0 if self._pooling.kind == "cls" else -1].float()
        self._counts[slot] += hidden.shape[0]

    def result(self, slot: int) -> tuple[float, ...]:
        """Return the embedding, or the numbers of a classifier, of the positions so far."""
        state = self._kept[slot]
        pooled = state / self._counts[slot] if self._pooling.kind == "mean" else state
        for layer in self._head:
            pooled = layer(pooled)
        pooled = torch.nn.functional.normalize(pooled, dim=0) if self._pooling.normalise else pooled
        return tuple(pooled[: self._pooling.size or len(pooled)].tolist())
