"""This rank's part of the logits, by torch on any device."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from services.worker.backends import keys
from services.worker.backends.base import Positions, Seeds, Temperatures
from services.worker.backends.noise import gumbel, row_keys, scale

_FOLD = 16


class TorchLogitShard:
    """Uses torch, on any device."""

    def __init__(self, first_id: int, vocab_local: int, device: torch.device) -> None:
        self.first_id = first_id
        self._vocabulary = torch.arange(first_id, first_id + vocab_local, device=device)  # [vocab_local]

    def sample(self, logits: Tensor, temperature: Temperatures, seeds: Seeds, positions: Positions) -> Tensor:
        """Return the key of each row's best score."""
        hot = np.flatnonzero(temperature > 0)
        if len(hot) == len(logits):
            logits = self._perturb(logits, temperature, seeds, positions)
        elif len(hot):
            rows = torch.from_numpy(hot)
            logits[rows] = self._perturb(logits[rows], temperature[hot], seeds[hot], positions[hot])
        values, columns = logits.max(dim=-1)  # [n]; the first maximum is the lowest id
        return keys.pack(values, self._vocabulary[columns])

    def _perturb(self, logits: Tensor, temperature: Temperatures, seeds: Seeds, positions: Positions) -> Tensor:
        return scale(logits, temperature).add_(gumbel(row_keys(seeds, positions), self._vocabulary))

    def best(self, logits: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """Return the keys of the `width` best columns and a bound on the values of the others.

        The columns are folded into stacks of _FOLD. The best `width` tokens are in the `width` stacks with the highest
        maxima, or tie with them, so two cheap passes over few numbers replace an expensive pass over all.
        """
        n, vocab_local = logits.shape
        n_stacks = vocab_local // _FOLD
        if n_stacks < 2 * width:
            best = torch.topk(keys.pack(logits, self._vocabulary), width, dim=-1).values
            return best, keys.values_of(best[:, -1:])
        folded = logits[:, : n_stacks * _FOLD].reshape(n, _FOLD, n_stacks)
        tops, stacks = torch.topk(folded.amax(dim=1), width + 1, dim=-1)  # [n, width + 1]
        steps = torch.arange(0, n_stacks * _FOLD, n_stacks, device=logits.device)  # [_FOLD]
        columns = (stacks[:, :width].unsqueeze(1) + steps.unsqueeze(-1)).flatten(1)  # [n, _FOLD * width]
        rest = torch.arange(n_stacks * _FOLD, vocab_local, device=logits.device)  # fewer than _FOLD columns
        columns = torch.cat((columns, rest.expand(n, -1)), dim=-1)
        best = torch.topk(keys.pack(logits.gather(1, columns), columns + self.first_id), width, dim=-1).values
        return best, torch.maximum(keys.values_of(best[:, -1:]), tops[:, -1:])

    def mass(self, logits: Tensor) -> Tensor:
        """Return the logsumexp."""
        return torch.logsumexp(logits, dim=-1, keepdim=True)
