"""This rank's part of the logits on CUDA: nothing that draws a token waits for the device."""

from __future__ import annotations

import torch
from torch import Tensor

from services.compute.backends.draws import Chances
from services.compute.backends.noise import row_words
from services.compute.backends.torch.logit_shard import TorchLogitShard


class CudaLogitShard(TorchLogitShard):
    """Chooses rows by a mask, since only the device knows which of them draw with noise."""

    def sample(self, logits: Tensor, chances: Chances) -> Tensor:
        """Return the key of each row's best score."""
        hot = chances.temperature > 0
        warm = torch.where(hot, chances.temperature, 1.0)
        drawn = self._perturb(logits, warm, row_words(chances.seeds, chances.positions))
        return self._best(torch.where(hot.unsqueeze(-1), drawn, logits))
