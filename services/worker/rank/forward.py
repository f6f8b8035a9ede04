"""Starts the computations of a step: to the hidden states, and to its tokens where the device draws them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Generic, Protocol, TypeVar

from torch import Tensor

from services.compute.backends.base import LogitShard
from services.compute.backends.batch import StepBatch, StepNumbers, long_tensor
from services.compute.backends.decodes import Decodes, Tokens
from services.compute.backends.transfers import Pending, Transfers
from services.worker.rank.batching import DrawingRows
from services.worker.rank.drawn import DrawnTokens

Cache = TypeVar("Cache")
CacheIn = TypeVar("CacheIn", contravariant=True)


class Model(Protocol[CacheIn]):
    """The decoder's interface to a rank."""

    logit_shard: LogitShard  # this rank's part of the vocabulary
    vocab_local: int  # columns of this rank's logits

    @property
    def exact_chunks(self) -> bool:
        """Whether a row has the same bits as one of several of its sequence and as a decode."""

    def forward(self, batch: StepBatch, cache: CacheIn, rows: Sequence[int] | None = None) -> Tensor:
        """Return the hidden states after the final norm: of all rows, [n_tokens, hidden_size].

        With `rows`, ascending indices, only those of these rows: [len(rows), hidden_size].
        """

    def logits(self, hidden: Tensor) -> Tensor:
        """Return float32 [n, vocab_local] of hidden states [n, hidden_size]."""

    def forget_cache(self) -> None:
        """Drop what refers to the cache of the last steps."""

    def replay_decodes(self, cache: CacheIn, tokens: Tokens | None) -> Decodes:
        """Return what replays whole decodes in `cache`, with the draws of `tokens`; None: nothing is drawn."""


class Forward(Generic[Cache]):
    """Computes steps in one cache: decodes as a whole if the device replays them, other steps part by part."""

    def __init__(
        self,
        decoder: Model[Cache],
        cache: Cache,
        transfers: Transfers,
        drawn: DrawnTokens | None,
    ) -> None:
        """`drawn`: None if no token is drawn on the device."""
        self._decoder, self._cache, self._transfers, self._drawn = decoder, cache, transfers, drawn
        self._decodes = decoder.replay_decodes(cache, drawn)

    def draw(self, numbers: StepNumbers, drawing: DrawingRows) -> Pending | None:
        """Compute a step and draw its tokens on the device, without waiting; a slot draws once.

        Returns None, and computes nothing, if steps do not overlap or if a draw needs the host.
        """
        if self._drawn is None or (drawn := self._drawn.numbers(drawing)) is None:
            return None
        rows = drawing.rows.tolist()
        if not self._replayed(numbers):
            arrays = numbers.arrays()
            tensors = self._transfers.up(arrays + drawn.arrays())
            hidden = self._compute(numbers, tensors[: len(arrays)], rows)
            draws = drawn.draws(tensors[len(arrays) :])
        elif len(rows) == len(numbers.token_ids) and drawn.filtered is None:
            return self._drawn.begin(self._decodes.forward(numbers, drawn), drawing)
        else:
            hidden = self.states(numbers, rows)
            draws = drawn.draws(self._transfers.up(drawn.arrays()))
        return self._drawn.begin(self._drawn.draw(self._decoder.logits(hidden), draws), drawing)

    def states(self, numbers: StepNumbers, rows: Sequence[int] | None) -> Tensor:
        """Compute a step, without waiting; returns what `Model.forward` does."""
        if not self._replayed(numbers):
            return self._compute(numbers, self._transfers.up(numbers.arrays()), rows)
        hidden = self._decodes.forward(numbers, None)
        if rows is None or len(rows) == len(hidden):
            return hidden
        return hidden[long_tensor(rows).to(hidden.device, non_blocking=True)]

    def _replayed(self, numbers: StepNumbers) -> bool:
        """Whether the device replays the step as a whole; replays read embeddings alone."""
        return numbers.images is None and self._decodes.serves(numbers)

    def _compute(self, numbers: StepNumbers, tensors: Sequence[Tensor], rows: Sequence[int] | None) -> Tensor:
        batch = numbers.batch(tensors)
        if self._drawn is not None:
            batch = replace(batch, token_ids=self._drawn.resolve(batch.token_ids))
        return self._decoder.forward(batch, self._cache, rows)
