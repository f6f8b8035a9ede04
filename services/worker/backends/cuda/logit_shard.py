"""This rank's part of the logits on CUDA: nothing that draws a token waits for the device."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from services.worker.backends import keys
from services.worker.backends.base import Positions, Seeds, Temperatures
from services.worker.backends.torch.logit_shard import TorchLogitShard


class CudaLogitShard(TorchLogitShard):
    """Chooses rows by a mask, since an index from the host would have to be waited for."""

    def sample(self, logits: Tensor, temperature: Temperatures, seeds: Seeds, positions: Positions) -> Tensor:
        """Return the key of each row's best score."""
        hot = temperature > 0
        if hot.any():
            warm = np.where(hot, temperature, np.float32(1))
            drawn = self._perturb(logits, warm, seeds, positions)
            mask = torch.from_numpy(hot).to(logits.device, non_blocking=True).unsqueeze(-1)
            logits = drawn if hot.all() else torch.where(mask, drawn, logits)
        values, columns = logits.max(dim=-1)
        return keys.pack(values, self._vocabulary[columns])
