"""Exact top-k, top-p and min-p over a vocabulary that is split over ranks, without gathering the logits.

Each filter keeps a prefix of the tokens in falling order. The prefix is exact when it ends within the certain
candidates; other rows gather eight times as many candidates and filter again.

Bound: the width starts at max(64, top_k + 16) and ends at the local vocabulary, so in the worst case (a flat
distribution with top_p near 1) the ranks exchange the whole vocabulary of such rows once.

Which rows are sure is for the host to decide. A draw that does not wait for it takes at once what surely suffices:
top_k candidates, or for rows without top_k the whole vocabulary, sorted (`draw_filtered`).

Filters apply after the temperature, in the order top-k, top-p (of what top-k kept), min-p.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.compute.backends import keys
from services.compute.backends.base import LogitShard
from services.compute.backends.collectives import Communicator
from services.compute.backends.draws import FilteredRows
from services.compute.backends.noise import gumbel
from services.compute.sampling.candidates import TokenCandidates, gather_candidates

_FIRST_WIDTH = 64
_SLACK = 16  # candidates beyond top_k, which usually contain all ties at its edge
_WIDEN = 8


@dataclass(frozen=True, slots=True)
class Limits:
    """The filters of n rows; 0, 1 and 0 switch one off."""

    top_k: NDArray[np.int64]  # [n]
    top_p: NDArray[np.float64]  # [n]
    min_p: NDArray[np.float64]  # [n]

    def columns(self) -> tuple[NDArray[Any], ...]:
        """Return the three limits."""
        return self.top_k, self.top_p, self.min_p

    def of(self, rows: NDArray[np.int64]) -> Limits:
        """Return the limits of some rows."""
        return Limits(self.top_k[rows], self.top_p[rows], self.min_p[rows])


@dataclass(frozen=True, slots=True)
class Filtered:
    """Filtered candidates of some rows, best first, the same on every rank."""

    rows: NDArray[np.int64]  # [n]
    values: Tensor  # [n, m] float32, scaled logits
    token_ids: Tensor  # [n, m] int64
    allowed: Tensor  # [n, m] bool, a prefix of each row


def filter_rows(comm: Communicator, shard: LogitShard, scaled: Tensor, limits: Limits) -> Iterator[Filtered]:
    """Filter rows of scaled logits [n, vocab_local]; yields each row once."""
    mass = keys.pack_bits(shard.mass(scaled))  # [n, 1]
    rows = np.arange(len(scaled))
    width = max(_FIRST_WIDTH, int(limits.top_k.max()) + _SLACK)
    while len(rows):
        candidates = gather_candidates(comm, shard, scaled, width, mass)
        total = torch.logsumexp(keys.unpack_bits(candidates.extra[:, :, 0]).double(), dim=0)  # [n]
        values = keys.values_of(candidates.keys)
        allowed = _keep(values, total, *(torch.from_numpy(each).to(scaled.device) for each in limits.columns()))
        certain = _certain(candidates, allowed, limits)
        sure = torch.from_numpy(np.flatnonzero(certain)).to(scaled.device)
        yield Filtered(rows[certain], values[sure], keys.token_ids_of(candidates.keys[sure]), allowed[sure])
        left = np.flatnonzero(~certain)
        again = torch.from_numpy(left).to(scaled.device)
        rows, scaled, mass, limits = rows[left], scaled[again], mass[again], limits.of(left)
        width *= _WIDEN


def draw_filtered(comm: Communicator, shard: LogitShard, scaled: Tensor, words: Tensor, limits: FilteredRows) -> Tensor:
    """Draw from what the filters keep of rows of scaled logits [n, vocab_local], without the host: ids [n] int64.

    `words`: [n, 2] of `row_words`. The tokens are those that a draw from the rows of `filter_rows` gives.
    """
    ids = torch.arange(shard.first_id, shard.first_id + scaled.shape[1], device=scaled.device)
    mine = keys.pack(scaled, ids)  # [n, vocab_local]
    width = min(limits.width or scaled.shape[1], scaled.shape[1])
    if width < scaled.shape[1]:
        mine = torch.topk(mine, width, dim=-1).values  # keys differ, so these are the best ones, ties included
    gathered = comm.all_gather(torch.cat((mine, keys.pack_bits(shard.mass(scaled))), dim=-1))  # [tp, n, width + 1]
    merged = gathered[:, :, :-1].transpose(0, 1).flatten(1).sort(dim=-1, descending=True).values
    total = torch.logsumexp(keys.unpack_bits(gathered[:, :, -1]).double(), dim=0)  # [n]
    values, token_ids = keys.values_of(merged), keys.token_ids_of(merged)
    allowed = _keep(values, total, limits.top_k, limits.top_p, limits.min_p)
    return keys.drawn_ids(winners(values, token_ids, allowed, words))


def winners(values: Tensor, token_ids: Tensor, allowed: Tensor, words: Tensor) -> Tensor:
    """Return the key of the best score among the `kept` of `values`, scaled logits: [n, m] each -> [n] int64."""
    scores = (values + gumbel(words, token_ids)).masked_fill_(~allowed, -torch.inf)
    return keys.pack(scores, token_ids).amax(dim=-1)


def _keep(values: Tensor, total: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Return which of the sorted `values` [n, m] the filters keep, given the rows' logsumexp `total` [n]."""
    m, limited = values.shape[1], top_k > 0
    # -inf marks masked tokens and vocabulary padding; a row of -inf only keeps its first column.
    allowed = torch.isfinite(values)
    allowed &= torch.arange(m, device=values.device) < torch.where(limited, top_k, m).unsqueeze(-1)
    probability = torch.exp(values.double() - total.unsqueeze(-1)) * allowed  # [n, m]
    # There are at least top_k candidates, so the mass that top-k keeps is the candidates' sum; without top-k it is 1.
    kept_mass = torch.where(limited, probability.sum(dim=-1), 1.0)
    before = probability.cumsum(dim=-1) - probability
    allowed &= (before < (top_p * kept_mass).unsqueeze(-1)) | (top_p >= 1.0).unsqueeze(-1)
    allowed &= probability >= (min_p.unsqueeze(-1) * probability[:, :1])
    allowed[:, 0] = True
    return allowed


def _certain(candidates: TokenCandidates, allowed: Tensor, limits: Limits) -> NDArray[np.bool_]:
    """Return whether each row's kept prefix consists of certain candidates only: [n]."""
    if candidates.complete:
        return np.ones(len(allowed), np.bool_)
    n_kept: NDArray[np.int64] = allowed.sum(dim=-1).cpu().numpy()
    n_certain: NDArray[np.int64] = candidates.n_certain.cpu().numpy()
    certain: NDArray[np.bool_] = (n_kept < n_certain) | ((n_kept == limits.top_k) & (n_kept == n_certain))
    return certain
