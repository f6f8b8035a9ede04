"""Copies KV blocks between this rank's cache and the staging area it shares with the server."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from services.worker.protocol.order_codec import CopyOrder


class BlockCopier:
    """Copies between the cache's layers [n_blocks + 1, ...], contiguous and of any format, and a staging area."""

    def __init__(
        self, layers: Sequence[Tensor], staging: memoryview, arrived: Callable[[Tensor], None] = lambda blocks: None
    ) -> None:
        """`arrived` is called with the blocks [n] that were written."""
        self._layers = [layer.view(layer.shape[0], -1) for layer in layers]  # [n_blocks + 1, elements]
        self._arrived = arrived
        self._staging = torch.frombuffer(staging, dtype=layers[0].dtype if layers else torch.uint8)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block, over all layers."""
        return sum(layer[0].nbytes for layer in self._layers)

    @torch.inference_mode()
    def copy(self, order: CopyOrder) -> None:
        """Execute an order of blocks that fit the staging area, which the server has checked."""
        layers, n, width = self._layers, len(order.blocks), self._layers[0].shape[1]
        device = layers[0].device
        staged = self._staging[: n * len(layers) * width].view(n, len(layers), width)
        index = torch.from_numpy(order.blocks).to(device, torch.int64)
        if not order.out:
            blocks = staged.to(device)
            for i, layer in enumerate(layers):
                layer[index] = blocks[:, i]
            self._arrived(index)
        elif staged.device == device:
            for i, layer in enumerate(layers):
                torch.index_select(layer, 0, index, out=staged[:, i])  # without a tensor between
        else:
            blocks = torch.empty_like(staged, device=device)
            for i, layer in enumerate(layers):
                blocks[:, i] = layer[index]
            staged.copy_(blocks)  # one transfer of all layers
