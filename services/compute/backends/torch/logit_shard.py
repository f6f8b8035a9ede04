"""This rank's part of the logits, by torch on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from services.compute.backends import keys
from services.compute.backends.draws import Chances
from services.compute.backends.noise import gumbel, row_words

_FOLD = 16


class TorchLogitShard:
    """Uses torch, on any device."""

    def __init__(self, first_id: int, vocab_local: int, device: torch.device) -> None:
        self.first_id = first_id
        self._vocabulary = torch.arange(first_id, first_id + vocab_local, device=device)  # [vocab_local]

    def sample(self, logits: Tensor, chances: Chances) -> Tensor:
        """Return the key of each row's best score."""
        temperature, words = chances.temperature, row_words(chances.seeds, chances.positions)
        hot = torch.nonzero(temperature > 0).squeeze(1)
        if len(hot) == len(logits):
            logits = self._perturb(logits, temperature, words)
        elif len(hot):
            logits[hot] = self._perturb(logits[hot], temperature[hot], words[hot])
        return self._best(logits)

    def _perturb(self, logits: Tensor, temperature: Tensor, words: Tensor) -> Tensor:
        return (logits / temperature.unsqueeze(-1)).add_(gumbel(words, self._vocabulary))

    def _best(self, scores: Tensor) -> Tensor:
        values, columns = scores.max(dim=-1)  # [n]; the first maximum is the lowest id
        return keys.pack(values, self._vocabulary[columns])

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
