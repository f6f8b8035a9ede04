"""The best tokens of a vocabulary that is split over ranks, without gathering it.

Each rank sends its `width` best; merged and sorted they are exact down to the horizon: the largest value that a
token which was not sent may have. Whoever needs more than that asks again with a larger width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from services.worker.backends import keys
from services.worker.backends.base import LogitShard
from services.worker.backends.collectives import Communicator


@dataclass(frozen=True, slots=True)
class TokenCandidates:
    """The merged candidates of n rows, the same on every rank."""

    keys: Tensor  # [n, m] int64, best first
    n_certain: Tensor  # [n] int64: the first so many are the row's best tokens, in order
    extra: Tensor  # [tp, n, e] int64, what each rank sent along
    complete: bool  # every token of the vocabulary was sent


def gather_candidates(
    comm: Communicator, shard: LogitShard, logits: Tensor, width: int, extra: Tensor
) -> TokenCandidates:
    """Merge the ranks' best tokens of `logits` [n, vocab_local].

    `extra` [n, e] int64 travels along.
    """
    vocab_local = logits.shape[1]
    width = min(width, vocab_local)
    mine, horizon = shard.best(logits, width)  # [n, width], [n, 1]
    gathered = comm.all_gather(torch.cat((mine, keys.pack_bits(horizon), extra), dim=-1))
    merged = gathered[:, :, :width].transpose(0, 1).flatten(1).sort(dim=-1, descending=True).values
    if width == vocab_local:
        n_certain = torch.full((len(merged),), merged.shape[1], device=logits.device)
    else:
        highest = keys.unpack_bits(gathered[:, :, width]).amax(dim=0)  # [n]
        n_certain = (keys.values_of(merged) > highest.unsqueeze(-1)).sum(dim=-1)
    return TokenCandidates(merged, n_certain, gathered[:, :, width + 1 :], width == vocab_local)
