"""The paged KV cache of one rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from services.compute.backends.kv_format import KvFormat
from services.compute.backends.shapes import KvShape
from services.compute.backends.states import StateStore
from services.compute.backends.zeros import zeros

Rotation = Callable[[Tensor], None]  # rotates the first rotary_dim elements of heads [n, n_heads, head_dim] in place


@dataclass(frozen=True, slots=True)
class KvLayer:
    """K and V of one layer, in the layout of the format."""

    kv_format: KvFormat
    shape: KvShape
    data: Tensor  # [n_blocks + 1, ...]


class CacheWriter(Protocol):
    """A device's write into the cache."""

    def store(self, layer: KvLayer, slots: Tensor, qkv: Tensor, rotation: Rotation | None = None) -> None:
        """Rotate the queries and keys of `qkv` [n_rows, heads of Q, K, V]; write K and V to the positions `slots` [n].

        The rows after the first n have no position. Queries, of which there may be none, are rotated in place; keys may
        be.
        """

    def summarise(self, layer: KvLayer, slots: Tensor, summaries: Tensor) -> None:
        """Write the summaries [n_blocks + 1, n_kv_heads, 2, head_dim] of blocks whose last position is in `slots` [n].

        A summary is the least and the largest number of each dimension of a block's keys.
        """


class KvCache:
    """K and V of every layer in blocks. Block 0, the null block, is always zero and is read where there is no key.

    `layers[i]` is [n_blocks + 1, ...] in the layout of the format. Blocks take no memory of the host until they are
    written, or taken: see `zeros`.
    """

    def __init__(
        self,
        kv_format: KvFormat,
        n_layers: int,
        n_blocks: int,
        shape: KvShape,
        dtype: torch.dtype,
        device: torch.device,
        writer: CacheWriter,
        states: StateStore | None = None,
        *,
        summarised: bool = False,
    ) -> None:
        """`dtype` is the dtype of the computation. `states`: those of recurrent layers, which have no keys.

        `summarised`: keep summaries of the keys of each block.
        """
        self.states = states
        self.kv_format, self.n_blocks, self.block_tokens = kv_format, n_blocks, shape.block_tokens
        self.layers = [kv_format.allocate(n_blocks + 1, shape, device) for _ in range(n_layers)]
        self._layers = [KvLayer(kv_format, shape, layer) for layer in self.layers]
        self._shape, self._dtype, self._writer = shape, dtype, writer
        # [n_blocks + 1, n_kv_heads, 2, head_dim] of each layer; [] if none are kept.
        sizes = (n_blocks + 1, shape.n_kv_heads, 2, shape.head_dim)
        n_summarised = n_layers if summarised else 0
        self.summaries = [zeros(sizes, dtype, device) for _ in range(n_summarised)]

    def store(self, layer: int, slots: Tensor, qkv: Tensor, rotation: Rotation | None = None) -> None:
        """Rotate queries and keys of `qkv`, and write K and V to `slots` of a layer, as `CacheWriter.store` does."""
        self._writer.store(self._layers[layer], slots, qkv, rotation)
        if self.summaries:
            self._writer.summarise(self._layers[layer], slots, self.summaries[layer])

    def summarise(self, blocks: Tensor) -> None:
        """Summarise full `blocks` [n] that were written by others, in all layers."""
        last = blocks * self.block_tokens + self.block_tokens - 1
        for layer, summaries in zip(self._layers, self.summaries, strict=False):
            self._writer.summarise(layer, last, summaries)

    def gather(self, layer: int, slots: Tensor, out: Tensor | None = None) -> Tensor:
        """Read `slots` [n]: [n, 2 * n_kv_heads * head_dim], K then V; into `out` if given."""
        return self.kv_format.read(self.layers[layer], self._shape, slots, self._dtype, out)


class StepRows(KvCache):
    """In place of a cache, the keys and values of a step's rows in the layer that is computed; nothing is kept."""

    def __init__(self, shape: KvShape) -> None:
        self.n_blocks, self.block_tokens, self.layers, self.summaries = 0, shape.block_tokens, [], []
        self._shape, self.states = shape, None
        self.rows = torch.empty(0)  # [n, 2 * n_kv_heads * head_dim], K then V

    def store(self, layer: int, slots: Tensor, qkv: Tensor, rotation: Rotation | None = None) -> None:
        """Rotate in place, and hold K and V until the next layer stores its own."""
        self.rows = rows_to_store(self._shape, slots, qkv, rotation)


def rows_to_store(shape: KvShape, slots: Tensor, qkv: Tensor, rotation: Rotation | None) -> Tensor:
    """Rotate the queries and keys of `qkv` in place; return K and V of its first rows, a view [len(slots), width]."""
    if rotation is not None:
        # The view comes before the slice, because otherwise a single row would get another stride.
        rotation(qkv.view(len(qkv), -1, shape.head_dim)[:, : -shape.n_kv_heads])
    return qkv[: len(slots), -shape.width :]
