"""Exact top-k, top-p and min-p over a vocabulary that is split over ranks, without gathering the logits.

Each filter keeps a prefix of the tokens in falling order. The prefix is exact when it ends within the certain
candidates; other rows gather eight times as many candidates and filter again.

Bound: the width starts at max(64, top_k + 16) and ends at the local vocabulary, so in the worst case (a flat
distribution with top_p near 1) the ranks exchange the whole vocabulary of such rows once.

Filters apply after the temperature, in the order top-k, top-p (of what top-k kept), min-p.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.worker.backends import keys
from services.worker.backends.base import LogitShard
from services.worker.backends.collectives import Communicator
from services.worker.sampling.candidates import TokenCandidates, gather_candidates

_FIRST_WIDTH = 64
_SLACK = 16  # candidates beyond top_k, which usually contain all ties at its edge
_WIDEN = 8


@dataclass(frozen=True, slots=True)
class Limits:
    """The filters of n rows; 0, 1 and 0 switch one off."""

    top_k: NDArray[np.int64]  # [n]
    top_p: NDArray[np.float64]  # [n]
    min_p: NDArray[np.float64]  # [n]

    def of(self, rows: NDArray[np.int64]) -> Limits:
        """Return the limits of some rows."""
        return Limits(self.top_k[rows], self.top_p[rows], self.min_p[rows])


@dataclass(frozen=True, slots=True)
class Filtered:
    """Filtered candidates of some rows, best first, the same on every rank."""

    rows: NDArray[np.int64]  # [n]
    values: Tensor  # [n, m] float32, scaled logits
    token_ids: Tensor  # [n, m] int64
    kept: Tensor  # [n, m] bool, a prefix of each row


def filter_rows(comm: Communicator, shard: LogitShard, scaled: Tensor, limits: Limits) -> Iterator[Filtered]:
    """Filter rows of scaled logits [n, vocab_local]; yields each row once."""
    mass = keys.pack_bits(shard.mass(scaled))  # [n, 1]
    rows = np.arange(len(scaled))
    width = max(_FIRST_WIDTH, int(limits.top_k.max()) + _SLACK)
    while len(rows):
        candidates = gather_candidates(comm, shard, scaled, width, mass)
        total = torch.logsumexp(keys.unpack_bits(candidates.extra[:, :, 0]).double(), dim=0)  # [n]
        values = keys.values_of(candidates.keys)
        kept = _keep(values, total, limits)
        certain = _certain(candidates, kept, limits)
        sure = torch.from_numpy(np.flatnonzero(certain)).to(scaled.device)
        yield Filtered(rows[certain], values[sure], keys.token_ids_of(candidates.keys[sure]), kept[sure])
        left = np.flatnonzero(~certain)
        again = torch.from_numpy(left).to(scaled.device)
        rows, scaled, mass, limits = rows[left], scaled[again], mass[again], limits.of(left)
        width *= _WIDEN


def _keep(values: Tensor, total: Tensor, limits: Limits) -> Tensor:
    """Return which of the sorted `values` [n, m] the filters keep, given the rows' logsumexp `total` [n]."""
    m, device = values.shape[1], values.device
    # -inf marks masked tokens and vocabulary padding; a row of -inf only keeps its first column.
    kept = torch.isfinite(values)
    top_k = torch.from_numpy(np.where(limits.top_k > 0, limits.top_k, m)).to(device)
    kept &= torch.arange(m, device=device) < top_k.unsqueeze(-1)
    probability = torch.exp(values.double() - total.unsqueeze(-1)) * kept  # [n, m]
    # There are at least top_k candidates, so the mass that top-k keeps is the candidates' sum; without top-k it is 1.
    limited = torch.from_numpy(limits.top_k > 0).to(device)
    kept_mass = torch.where(limited, probability.sum(dim=-1), 1.0)
    before = probability.cumsum(dim=-1) - probability
    top_p = torch.from_numpy(limits.top_p).to(device)
    kept &= (before < (top_p * kept_mass).unsqueeze(-1)) | (top_p >= 1.0).unsqueeze(-1)
    min_p = torch.from_numpy(limits.min_p).to(device)
    kept &= probability >= (min_p.unsqueeze(-1) * probability[:, :1])
    kept[:, 0] = True
    return kept


def _certain(candidates: TokenCandidates, kept: Tensor, limits: Limits) -> NDArray[np.bool_]:
    """Return whether each row's kept prefix consists of certain candidates only: [n]."""
    if candidates.complete:
        return np.ones(len(kept), np.bool_)
    n_kept: NDArray[np.int64] = kept.sum(dim=-1).cpu().numpy()
    n_certain: NDArray[np.int64] = candidates.n_certain.cpu().numpy()
    certain: NDArray[np.bool_] = (n_kept < n_certain) | ((n_kept == limits.top_k) & (n_kept == n_certain))
    return certain
