"""The paged KV cache of one rank."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from services.compute.backends.kv_format import KvFormat, RowWriter
from services.compute.backends.shapes import KvShape


class KvCache:
    """K and V of every layer in blocks. Block 0, the null block, is always zero and is read where there is no key.

    `layers[i]` is [n_blocks + 1, ...] in the layout of the format.
    """

    def __init__(
        self,
        kv_format: KvFormat,
        n_layers: int,
        n_blocks: int,
        shape: KvShape,
        dtype: torch.dtype,
        device: torch.device,
        writer: RowWriter,
    ) -> None:
        """`dtype` is the dtype of the computation."""
        self.kv_format, self.n_blocks, self.block_tokens = kv_format, n_blocks, shape.block_tokens
        self.layers = [kv_format.allocate(n_blocks + 1, shape, device) for _ in range(n_layers)]
        self._shape, self._dtype, self._writer = shape, dtype, writer

    def write(self, layer: int, slots: Tensor, rows: Tensor) -> None:
        """Write `rows` [n, 2 * n_kv_heads * head_dim], K then V, to `slots` [n] of a layer."""
        self.kv_format.write(self.layers[layer], self._shape, slots, rows, self._writer)

    def write_rotated(
        self, layer: int, slots: Tensor, qkv: Tensor, n_rotated: int, rotation: Callable[[Tensor], None]
    ) -> None:
        """Rotate the first `n_rotated` heads of `qkv` [n_rows, heads of Q, K, V]; write K and V to `slots` [n].

        Queries are rotated in place; keys may be.
        """
        heads = qkv.view(len(qkv), -1, self._shape.head_dim)
        form, shape = self.kv_format, self._shape
        form.write_rotated(self.layers[layer], shape, slots, heads, n_rotated, rotation, self._writer)

    def gather(self, layer: int, slots: Tensor, out: Tensor | None = None) -> Tensor:
        """Read `slots` [n]: [n, 2 * n_kv_heads * head_dim], K then V; into `out` if given."""
        return self.kv_format.read(self.layers[layer], self._shape, slots, self._dtype, out)


class StepRows(KvCache):
    """In place of a cache, the keys and values of a step's rows in the layer that is computed; nothing is kept."""

    def __init__(self, shape: KvShape) -> None:
        self.n_blocks, self.block_tokens, self.layers = 0, shape.block_tokens, []
        self._shape = shape
        self.rows = torch.empty(0)  # [n, 2 * n_kv_heads * head_dim], K then V

    def write(self, layer: int, slots: Tensor, rows: Tensor) -> None:
        """Hold `rows` [n, 2 * n_kv_heads * head_dim] until the next layer writes its own."""
        self.rows = rows

    def write_rotated(
        self, layer: int, slots: Tensor, qkv: Tensor, n_rotated: int, rotation: Callable[[Tensor], None]
    ) -> None:
        """Rotate in place, and hold K and V."""
        rotation(qkv.view(len(qkv), -1, self._shape.head_dim)[:, :n_rotated])
        self.write(layer, slots, qkv[: len(slots), -self._shape.width :])
