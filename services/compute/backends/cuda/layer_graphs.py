"""All layers but the last as CUDA graphs, for steps of prompts and decodes in any mixture.

A graph is captured for a number of rows. The attention of any step with so many rows can be laid out in its tensors:
programs that have no work end at once. With more rows than `ROWS` a GPU computes longer than Python launches.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from services.compute.backends.base import Computations, Step
from services.compute.backends.batch import AdapterRows, StepBatch
from services.compute.backends.cuda.graph import Uploads
from services.compute.backends.cuda.paged import prompt_tiles
from services.compute.backends.cuda.recorder import Recorder

logger = logging.getLogger(__name__)

# From 128 rows on products take longer the more rows they have, so padding costs time there.
ROWS = (16, 32, 64, *range(128, 1024, 128), *range(1024, 2049, 256))
_SEQUENCES = 256  # most of a step
_DECODES = (16, 64, _SEQUENCES)
_KEYS = (1 << 12, 1 << 14, 1 << 16)  # key count of the longest sequence
_MAX_KEYS = 1 << 20  # limit of the keys of all decodes in a graph


@runtime_checkable
class MixedAttention(Protocol):
    """An attention whose steps can be laid out in tensors that a graph reads."""

    tile_rows: int  # most rows of a tile

    def mixed_plan(self, lengths: Tensor, tables: Tensor, tiles: Tensor, n_keys: int, window: int | None) -> Any:
        """Return the plan of a step whose first sequences are decodes with `lengths` [n] keys, at most `n_keys`.

        A decode of length 0, and a tile of no rows, is room that the step does not use. `tables`: [n_sequences,
        max_blocks]; `tiles`: [n_tiles, 4], as `prompt_tiles` returns them. Rows of no sequence get zeros.
        """


@dataclass(frozen=True, slots=True)
class MixedSizes:
    """The size of a graph; smaller steps are padded to it."""

    n_rows: int
    n_decodes: int
    n_keys: int  # key count of the longest sequence

    @classmethod
    def of(cls, batch: StepBatch) -> MixedSizes | None:
        """Return the next larger sizes that graphs have; None: there are none."""
        n_rows, longest = len(batch.token_ids), max(batch.context_lens)
        if n_rows > ROWS[-1] or batch.n_sequences > _SEQUENCES or longest > _KEYS[-1]:
            return None
        rows, keys = _next(ROWS, n_rows), _next(_KEYS, longest)
        decodes = min(rows, _next(_DECODES, batch.n_decode))
        return cls(rows, decodes, keys) if decodes * keys <= _MAX_KEYS else None


@dataclass(frozen=True, slots=True)
class _Inputs:
    """The inputs of all graphs, always at the same addresses; each graph reads the beginning."""

    x: Tensor  # [ROWS[-1], hidden_size]; also holds the result
    positions: Tensor  # [ROWS[-1]] int64
    kv_slots: Tensor
    adapters: Tensor  # slots
    lengths: Tensor  # [_SEQUENCES] int64, of the decodes
    tiles: Tensor  # [4 * n_tiles] int32 as uint8
    tables: dict[int, Tensor] = field(default_factory=dict)  # by the most keys: [_SEQUENCES, max_blocks] int64


class LayerGraphs:
    """Replays all layers but the last. Serves fewer rows than those of a step that has needed the host."""

    def __init__(
        self,
        computations: Computations,
        attention: MixedAttention,
        uploads: Uploads,
        recorder: Recorder,
        dtype: torch.dtype,
        device: torch.device,
        *,
        adapters: bool,
    ) -> None:
        """`adapters`: whether graphs can hold their products."""
        self._computations, self._attention, self._uploads = computations, attention, uploads
        self._recorder, self._adapters = recorder, adapters
        self._replays: dict[MixedSizes, Callable[[], None]] = {}
        self._most_rows = ROWS[-1]
        empty = partial(torch.zeros, dtype=torch.int64, device=device)
        self._inputs = _Inputs(
            x=torch.zeros(ROWS[-1], computations.hidden_size, dtype=dtype, device=device),
            positions=empty(ROWS[-1]),
            kv_slots=empty(ROWS[-1]),
            adapters=empty(ROWS[-1]),
            lengths=empty(_SEQUENCES),
            tiles=torch.zeros(16 * _most_tiles(ROWS[-1], attention.tile_rows), dtype=torch.uint8, device=device),
        )

    def serves(self, batch: StepBatch) -> bool:
        """Whether `forward` can replay or capture this step."""
        if batch.narrowed is not None or (batch.adapters is not None and not self._adapters):
            return False
        sizes = MixedSizes.of(batch)
        return sizes is not None and sizes.n_rows <= self._most_rows

    def forward(self, x: Tensor, batch: StepBatch) -> Tensor:
        """Compute the rows `x` [n, hidden_size] of a step that is served."""
        sizes = MixedSizes.of(batch)
        assert sizes is not None
        self._fill(x, batch, sizes)
        replay = self._replays.get(sizes)
        if replay is None:
            self._first(x, batch, sizes)
        else:
            replay()
        return self._inputs.x[: len(x)]

    def _first(self, x: Tensor, batch: StepBatch, sizes: MixedSizes) -> None:
        """Compute a step, and capture it for those that follow."""
        compute = partial(self._compute, sizes, adapted=batch.adapters is not None)
        try:
            self._recorder.probe(compute)
        except RuntimeError as error:
            logger.info("steps of %d rows and more are not replayed: %s", sizes.n_rows, error)
            self._most_rows = sizes.n_rows - 1
            self._fill(x, batch, sizes)  # the layers may have overwritten it
            compute()
            return
        self._replays[sizes] = self._recorder.record(compute).replay

    def _fill(self, x: Tensor, batch: StepBatch, sizes: MixedSizes) -> None:
        """Write the step to where graphs read it. Padding rows hold old numbers; their keys go to the null block."""
        given, n, (n_sequences, width) = self._inputs, len(x), batch.block_tables.shape
        given.x[:n], given.positions[:n], given.kv_slots[:n] = x, batch.positions, batch.kv_slots
        given.kv_slots[n : sizes.n_rows].zero_()
        given.lengths[: batch.n_decode] = batch.device_lengths()[: batch.n_decode]
        given.lengths[batch.n_decode : sizes.n_decodes].zero_()
        self._tables(sizes)[:n_sequences, :width] = batch.block_tables  # later entries are never used
        if batch.adapters is not None:
            given.adapters[:n] = batch.adapters.slots
        tile_rows = self._attention.tile_rows
        needed, tiles = prompt_tiles(batch, tile_rows), np.zeros((_most_tiles(sizes.n_rows, tile_rows), 4), np.int32)
        tiles[: len(needed)] = needed
        self._uploads.up_to([tiles], given.tiles[: tiles.nbytes])

    def _tables(self, sizes: MixedSizes) -> Tensor:
        tables = self._inputs.tables
        if sizes.n_keys not in tables:
            n_blocks = -(-sizes.n_keys // self._computations.cache.block_tokens)
            tables[sizes.n_keys] = self._inputs.lengths.new_zeros(_SEQUENCES, n_blocks)
        return tables[sizes.n_keys]

    def _compute(self, sizes: MixedSizes, *, adapted: bool) -> Tensor:
        """Compute the step that `_fill` has written."""
        given, computations, n = self._inputs, self._computations, sizes.n_rows
        positions, lengths, tables = given.positions[:n], given.lengths[: sizes.n_decodes], self._tables(sizes)
        n_tiles = _most_tiles(n, self._attention.tile_rows)
        tiles = given.tiles[: 16 * n_tiles].view(torch.int32).view(n_tiles, 4)
        step = Step(
            batch=StepBatch(
                token_ids=positions,  # layers do not read them
                positions=positions,
                kv_slots=given.kv_slots[:n],
                query_starts=(0, n),
                context_lens=(sizes.n_keys,),
                block_tables=tables,
                n_decode=0,
            ),
            cache=computations.cache,
            rotations=tuple(rope(positions) for rope in computations.ropes),
            plans=tuple(
                self._attention.mixed_plan(lengths, tables, tiles, sizes.n_keys, window)
                for window in computations.windows
            ),
            reduce=computations.comm.all_reduce,
            adapters=AdapterRows(given.adapters[:n], ()) if adapted else None,
        )
        x = given.x[:n]
        x.copy_(computations.layers(x, step))
        torch._foreach_zero_([layer[0] for layer in computations.cache.layers])  # the null block
        return x


def _most_tiles(n_rows: int, tile_rows: int) -> int:
    """Return the most tiles of a step: the sequences of tiles have two rows or more, and each a last tile."""
    return n_rows // tile_rows + min(n_rows // 2, _SEQUENCES)


def _next(sizes: tuple[int, ...], n: int) -> int:
    """Return the smallest of the ascending `sizes` that is not below `n`."""
    return next(size for size in sizes if size >= n)
