"""The best tokens of a vocabulary that is split over ranks, without gathering it.

Each rank offers its `width` best; merged and sorted they are exact down to the horizon: the largest value that a
token which was not offered may have. Whoever needs more than that asks again with a larger width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from services.worker.parallel.communicator import Communicator
from services.worker.sampling import keys

_FOLD = 16


@dataclass(frozen=True, slots=True)
class Offers:
    """The merged offers of n rows, the same on every rank."""

    keys: Tensor  # [n, m] int64, best first
    n_certain: Tensor  # [n] int64: the first so many are the row's best tokens, in order
    extra: Tensor  # [tp, n, e] int64, what each rank sent along
    complete: bool  # every token of the vocabulary was offered


def gather_offers(comm: Communicator, logits: Tensor, first_id: int, width: int, extra: Tensor) -> Offers:
    """Merge the ranks' best tokens of `logits` [n, vocab_local], whose columns begin at token `first_id`.

    `extra` [n, e] int64 travels along.
    """
    vocab_local = logits.shape[1]
    width = min(width, vocab_local)
    mine, horizon = _best(logits, first_id, width)  # [n, width], [n, 1]
    gathered = comm.all_gather(torch.cat((mine, keys.pack_bits(horizon), extra), dim=-1))
    merged = gathered[:, :, :width].transpose(0, 1).flatten(1).sort(dim=-1, descending=True).values
    if width == vocab_local:
        n_certain = torch.full((len(merged),), merged.shape[1], device=logits.device)
    else:
        highest = keys.unpack_bits(gathered[:, :, width]).amax(dim=0)  # [n]
        n_certain = (keys.values_of(merged) > highest.unsqueeze(-1)).sum(dim=-1)
    return Offers(merged, n_certain, gathered[:, :, width + 1 :], width == vocab_local)


def _best(logits: Tensor, first_id: int, width: int) -> tuple[Tensor, Tensor]:
    """Return the keys of the `width` best columns and a bound on the values of the others: [n, width], [n, 1].

    With the columns folded into stacks of _FOLD, the best `width` tokens can only lie in the `width` stacks with
    the highest tops (or tie with them): two cheap passes over few numbers replace one dear pass over all.
    """
    n, vocab_local = logits.shape
    n_stacks = vocab_local // _FOLD
    if n_stacks < 2 * width:
        best = torch.topk(keys.pack(logits, _ids(first_id, vocab_local, logits)), width, dim=-1).values
        return best, keys.values_of(best[:, -1:])
    folded = logits[:, : n_stacks * _FOLD].reshape(n, _FOLD, n_stacks)
    tops, stacks = torch.topk(folded.amax(dim=1), width + 1, dim=-1)  # [n, width + 1]
    steps = torch.arange(0, n_stacks * _FOLD, n_stacks, device=logits.device)  # [_FOLD]
    columns = (stacks[:, :width].unsqueeze(1) + steps.unsqueeze(-1)).flatten(1)  # [n, _FOLD * width]
    rest = torch.arange(n_stacks * _FOLD, vocab_local, device=logits.device)  # fewer than _FOLD columns
    columns = torch.cat((columns, rest.expand(n, -1)), dim=-1)
    best = torch.topk(keys.pack(logits.gather(1, columns), columns + first_id), width, dim=-1).values
    return best, torch.maximum(keys.values_of(best[:, -1:]), tops[:, -1:])


def _ids(first_id: int, count: int, like: Tensor) -> Tensor:
    return torch.arange(first_id, first_id + count, device=like.device)
