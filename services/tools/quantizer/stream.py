"""The calibration's rows between two layers: they pass one layer after another, and only one layer is in memory."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from services.compute.backends.base import Step
from services.compute.backends.batch import StepBatch
from services.compute.model.decoder import Decoder
from services.compute.model.layers.embedding import pad_rows

_BLOCK_TOKENS = 16
_STEP_ROWS = 2048  # rows that a layer computes at once; they bound the memory of its activations

Layer = Callable[[Tensor, Step], Tensor]


class Stream:
    """The rows of all sequences before the next layer."""

    def __init__(self, frame: Decoder, ids: Tensor, device: torch.device) -> None:
        """`frame` has no layers; `ids` [n_sequences, length] are embedded."""
        self._frame, length = frame, ids.shape[1]
        at_once = max(1, _STEP_ROWS // length)
        self._batches = [_batch(ids[first : first + at_once], device) for first in range(0, len(ids), at_once)]
        n_blocks = at_once * -(-length // _BLOCK_TOKENS)
        self._cache = frame.make_cache(n_blocks, _BLOCK_TOKENS)
        # Layers run one after another over all rows, so that one layer's blocks serve all.
        self._cache.layers = self._cache.layers[:1] * frame.spec.n_layers
        self._rows = [self._embed(batch) for batch in self._batches]

    def advance(self, layer: Layer, before: Callable[[int], None] = lambda _: None) -> None:
        """Let all rows pass `layer`; `before` is called with the number of rows of each step."""
        for index, batch in enumerate(self._batches):
            before(len(batch.token_ids))
            self._rows[index] = self._through(layer, batch, self._rows[index])

    def look(self, layer: Layer, before: Callable[[int], None]) -> None:
        """Let `layer` compute all rows, which stay before it; `before` is called as in :meth:`advance`."""
        for batch, x in zip(self._batches, self._rows, strict=True):
            before(len(batch.token_ids))
            self._through(layer, batch, x.clone())

    def _embed(self, batch: StepBatch) -> Tensor:
        _, n_rows = self._frame.lay_out(batch, self._cache)
        return self._frame.embed(pad_rows(batch.token_ids, n_rows), pad_rows(batch.positions, n_rows))

    def _through(self, layer: Layer, batch: StepBatch, x: Tensor) -> Tensor:
        step, _ = self._frame.lay_out(batch, self._cache)
        return layer(x, step)


def _batch(ids: Tensor, device: torch.device) -> StepBatch:
    """Return the step that computes the sequences `ids` [n_sequences, length] whole."""
    n_sequences, length = ids.shape
    per_sequence = -(-length // _BLOCK_TOKENS)
    first = torch.arange(n_sequences).unsqueeze(1) * per_sequence + 1  # block 0 is the null block
    positions = torch.arange(length).expand(n_sequences, -1)
    return StepBatch(
        token_ids=ids.flatten().to(device),
        positions=positions.flatten().to(device),
        kv_slots=(first * _BLOCK_TOKENS + positions).flatten().to(device),
        query_starts=tuple(range(0, n_sequences * length + 1, length)),
        context_lens=(length,) * n_sequences,
        block_tables=(first + torch.arange(per_sequence)).to(device),
        n_decode=0,
    )
