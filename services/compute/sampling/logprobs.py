"""Log-probabilities of given tokens and of the most likely ones, over a vocabulary split over ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from services.compute.backends import keys
from services.compute.backends.base import LogitShard
from services.compute.backends.collectives import Communicator
from services.compute.sampling.candidates import TokenCandidates, gather_candidates
from services.compute.token_logprobs import TokenLogprobs

_SLACK = 8  # candidates beyond the wanted top tokens, which usually contain all ties at the edge
_WIDEN = 8


def token_logprobs(
    comm: Communicator, shard: LogitShard, logits: Tensor, token_ids: Tensor, n_top: list[int]
) -> list[TokenLogprobs]:
    """Return the log-probabilities at n rows of `logits` [n, vocab_local].

    `token_ids` [n] has a token per row, `n_top[i]` is the number of most likely tokens that row i wants. Rank and top
    tokens use one order: by value, ties by the lower id.
    """
    mass = shard.mass(logits)  # [n, 1]
    own = _own_values(logits, token_ids, shard.first_id)  # [n, 1]
    candidates = _wide_enough(comm, shard, logits, n_top, keys.pack_bits(torch.cat((mass, own), dim=-1)))
    masses, owns = keys.unpack_bits(candidates.extra).double().unbind(dim=-1)  # [tp, n]
    total, drawn = torch.logsumexp(masses, dim=0), owns.amax(dim=0)  # [n]
    better = comm.all_gather(_n_better(logits, drawn.float(), token_ids, shard.first_id)).sum(dim=0)  # [n]
    drawn_logprobs = (drawn - total).tolist()
    most = max(n_top)
    best = candidates.keys[:, :most]
    top_logprobs = (keys.values_of(best).double() - total.unsqueeze(-1)).tolist()
    top_ids = keys.token_ids_of(best).tolist()
    return [
        TokenLogprobs(
            token_id=token,
            logprob=drawn_logprobs[row],
            rank=1 + n_better,
            top_ids=tuple(top_ids[row][: n_top[row]]),
            top_logprobs=tuple(top_logprobs[row][: n_top[row]]),
        )
        for row, (token, n_better) in enumerate(zip(token_ids.tolist(), better.tolist(), strict=True))
    ]


def _own_values(logits: Tensor, token_ids: Tensor, first_id: int) -> Tensor:
    """Return the logits of `token_ids` [n], -inf where this rank does not hold the token: [n, 1]."""
    columns = token_ids - first_id
    here = (columns >= 0) & (columns < logits.shape[1])
    values = logits.gather(1, columns.clamp(0, logits.shape[1] - 1).unsqueeze(-1))
    return values.masked_fill(~here.unsqueeze(-1), -torch.inf)


def _n_better(logits: Tensor, values: Tensor, token_ids: Tensor, first_id: int) -> Tensor:
    """Count this rank's tokens ordered before each row's (value, token id): [n]."""
    ahead = (logits > values.unsqueeze(-1)).sum(dim=-1)
    ids = torch.arange(first_id, first_id + logits.shape[1], device=logits.device)
    ties = (logits == values.unsqueeze(-1)) & (ids < token_ids.unsqueeze(-1))  # [n, vocab_local]
    return ahead + ties.sum(dim=-1)


def _wide_enough(
    comm: Communicator, shard: LogitShard, logits: Tensor, n_top: list[int], extra: Tensor
) -> TokenCandidates:
    wanted = torch.tensor(n_top, device=logits.device)
    width = max(n_top) + _SLACK
    while True:
        candidates = gather_candidates(comm, shard, logits, width, extra)
        if candidates.complete or bool((candidates.n_certain >= wanted).all()):
            return candidates
        width *= _WIDEN
