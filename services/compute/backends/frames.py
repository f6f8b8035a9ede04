"""Attention of rows of frames of images to each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from services.compute.backends.batch import StepBatch
from services.compute.backends.kv_cache import KvCache


class FrameAttention(Protocol):
    """Attends with rows of frames of images, each of which sees all keys up to the end of its frame."""

    def frame_tiles(self, batch: StepBatch, block_tokens: int, window: int | None) -> tuple[Any, ...]:
        """Lay out the calls for the frames of a step; `window` counts the keys up to a row's own."""

    def rows_of_tiles(self, tiles: tuple[Any, ...]) -> int:
        """Rows of `q` that `attend_tiles` may read."""

    def attend_tiles(self, q: Tensor, out: Tensor, cache: KvCache, layer: int, tiles: tuple[Any, ...]) -> None:
        """Write the results of the frames' rows to `out`, both [n_rows, n_heads * head_dim]."""


@dataclass(frozen=True, slots=True)
class StepFrames:
    """The frames of a step whose rows attend to each other."""

    attention: FrameAttention
    tiles: tuple[tuple[Any, ...], ...]  # by window

    def attend(self, q: Tensor, out: Tensor, cache: KvCache, layer: int, plan: int) -> None:
        """Replace the frames' rows of `out`, for layers with the window of `plan`."""
        self.attention.attend_tiles(q, out, cache, layer, self.tiles[plan])
