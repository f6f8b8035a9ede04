"""Copies KV blocks between this rank's cache and the staging area it shares with the server."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from services.worker.protocol.order_codec import CopyOrder


class BlockCopier:
    """Copies between the cache's layers [n_blocks + 1, ...], contiguous and of any format, and a staging area."""

    def __init__(self, layers: Sequence[Tensor], staging: memoryview) -> None:
        self._layers = [layer.view(layer.shape[0], -1) for layer in layers]  # [n_blocks + 1, elements]
        self._staging = torch.frombuffer(staging, dtype=layers[0].dtype if layers else torch.uint8)

    @torch.inference_mode()
    def copy(self, order: CopyOrder) -> None:
        """Execute an order of blocks that fit the staging area, which the server has checked."""
        n, width = len(order.blocks), self._layers[0].shape[1]
        staged = self._staging[: n * len(self._layers) * width].view(n, len(self._layers), width)
        index = torch.from_numpy(order.blocks).to(self._layers[0].device, torch.int64)
        for i, layer in enumerate(self._layers):
            if order.out:
                staged[:, i] = layer[index].to(staged.device)
            else:
                layer[index] = staged[:, i].to(layer.device)
