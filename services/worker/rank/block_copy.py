"""Copies KV blocks between this rank's cache and the staging area it shares with the server."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from services.worker.protocol.copy_codec import CopyOrder


class BlockCopier:
    """Copies between the cache's layers [n_blocks + 1, ...], contiguous and of any format, and a staging area."""

    def __init__(self, layers: Sequence[Tensor], staging: memoryview) -> None:
        self._layers = [layer.view(layer.shape[0], -1) for layer in layers]  # [n_blocks + 1, elements]
        self._staging = torch.frombuffer(staging, dtype=layers[0].dtype if layers else torch.uint8)

    @torch.inference_mode()
    def copy(self, order: CopyOrder) -> None:
        """Execute an order. Raises ValueError when the blocks do not fit the staging area or do not exist."""
        n, (n_known, width) = len(order.blocks), self._layers[0].shape
        used = n * len(self._layers) * width
        if used > len(self._staging):
            raise ValueError(f"{n} blocks do not fit the staging area of {self._staging.nbytes} bytes")
        if order.blocks.min() < 1 or order.blocks.max() >= n_known:
            raise ValueError(f"a block to copy is outside 1 to {n_known - 1}: {order.blocks.tolist()}")
        staged = self._staging[:used].view(n, len(self._layers), width)
        index = torch.from_numpy(order.blocks).to(self._layers[0].device, torch.int64)
        for i, layer in enumerate(self._layers):
            if order.out:
                staged[:, i] = layer[index].to(staged.device)
            else:
                layer[index] = staged[:, i].to(layer.device)
