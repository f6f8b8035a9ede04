"""Attention of encoders: every row sees the rows of its own sequence, before and after it, and nothing is cached.

Each sequence is attended in calls of its own, whose shapes follow from its length alone. So a row's bits do not depend
on the other sequences of a step, and there is no padding.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch.nn import functional as F

from services.compute.backends.batch import StepBatch
from services.compute.backends.kv_cache import KvCache, StepRows
from services.compute.backends.shapes import AttentionShape

_TILE_ROWS = 256  # rows of a call of a layer with a window, which reads only the keys that they see


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows that are attended in one call, and the rows whose keys they see."""

    rows: slice
    keys: slice
    mask: torch.Tensor | None  # [n_rows, n_keys] bool, True for keys that a row sees; None: all


@dataclass(frozen=True, slots=True)
class BidirectionalPlan:
    """One step's calls for one window."""

    n_rows: int
    tiles: tuple[Tile, ...]


class BidirectionalAttention:
    """Runs scaled_dot_product_attention on a step's own keys. A window counts the keys on either side of a row."""

    exact_chunks = False

    def __init__(self, shape: AttentionShape) -> None:
        """Raises ValueError for scores that torch's kernel does not compute."""
        if shape.softcap is not None or shape.slopes:
            raise ValueError("bidirectional attention with capped or biased scores is not implemented")
        self._shape = shape

    def plan(self, batch: StepBatch, block_tokens: int, window: int | None) -> BidirectionalPlan:
        """Lay out the step's calls for layers with `window`."""
        starts, device = batch.query_starts, batch.token_ids.device
        tiles = [tile for first, end in pairwise(starts) for tile in _tiles(first, end, window, device)]
        return BidirectionalPlan(starts[-1], tuple(tiles))

    def n_rows(self, plan: BidirectionalPlan) -> int:
        """Rows of `q` that `attend` reads."""
        return plan.n_rows

    def attend(self, q: torch.Tensor, cache: KvCache, layer: int, plan: BidirectionalPlan) -> torch.Tensor:
        """Attend with `q` [n_rows, n_heads * head_dim]; returns the same shape."""
        assert isinstance(cache, StepRows)
        shape, rows = self._shape, cache.rows
        out = torch.zeros_like(q, memory_format=torch.contiguous_format)
        queries, results = (x.view(len(x), shape.n_heads, shape.head_dim) for x in (q, out))
        kv = rows.view(len(rows), 2, shape.n_kv_heads, shape.head_dim)
        for tile in plan.tiles:
            k, v = (part.repeat_interleave(shape.group, 1) for part in kv[tile.keys].unbind(1))
            # [1, n_heads, n, head_dim] each
            rows_of_tile, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (queries[tile.rows], k, v))
            attended = F.scaled_dot_product_attention(rows_of_tile, k, v, attn_mask=tile.mask, scale=shape.scale)
            results[tile.rows] = attended[0].transpose(0, 1)
        return out


def _tiles(first: int, end: int, window: int | None, device: torch.device) -> list[Tile]:
    """Return the calls of the sequence that owns the rows [first, end)."""
    if window is None or end - first <= window:  # no two rows are further apart
        return [Tile(slice(first, end), slice(first, end), None)]
    tiles = []
    for low in range(first, end, _TILE_ROWS):
        high = min(low + _TILE_ROWS, end)
        keys = slice(max(first, low - window + 1), min(end, high + window - 1))
        rows, columns = (torch.arange(at.start, at.stop, device=device) for at in (slice(low, high), keys))
        mask = (rows.unsqueeze(1) - columns).abs() < window
        tiles.append(Tile(slice(low, high), keys, mask))
    return tiles
