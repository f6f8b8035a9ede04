"""Finds the best tokens of a vocabulary that is split over ranks, without gathering the logits.

Each rank sends its `width` best tokens. Merged and sorted they are exact above the horizon, which is the largest
value that an unsent token may have. A caller that needs more tokens calls again with a larger width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from services.compute.backends import keys
from services.compute.backends.base import LogitShard
from services.compute.backends.collectives import Communicator


@dataclass(frozen=True, slots=True)
class TokenCandidates:
    """The merged candidates of n rows, the same on every rank."""

    keys: Tensor  # [n, m] int64, best first
    n_certain: Tensor  # [n] int64: this many first candidates are the row's best tokens, in order
    extra: Tensor  # [tp, n, e] int64, the ranks' `extra`
    complete: bool  # the ranks sent every token of the vocabulary


def gather_candidates(
    comm: Communicator, shard: LogitShard, logits: Tensor, width: int, extra: Tensor
) -> TokenCandidates:
    """Merge the ranks' best tokens of `logits` [n, vocab_local].

    `extra` [n, e] int64 is gathered in the same collective.
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
