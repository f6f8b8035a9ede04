"""Token embedding and output head, with the vocabulary divided among the ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from services.compute.backends.base import Linear, Lookup
from services.compute.backends.collectives import Communicator
from services.compute.model.footprint import local_vocabulary
from services.compute.model.layers.linear import LinearLoader
from services.compute.model.shard import Shard, Span


@dataclass(frozen=True, slots=True)
class VocabShard:
    """This rank's slice [start, start + local) of the padded vocabulary, of which `valid` ids exist."""

    start: int
    local: int
    valid: int

    @property
    def rows(self) -> Span:
        """The stored rows of this slice."""
        return Span(self.start, self.start + self.valid)


def divide_vocabulary(vocab_size: int, comm: Communicator) -> VocabShard:
    """Return this rank's slice; all ranks have slices of the same length, and the last ones are padded."""
    local = local_vocabulary(vocab_size, comm.size)
    start = comm.rank * local
    return VocabShard(start, local, max(0, min(local, vocab_size - start)))


class VocabEmbedding:
    """Looks up token embeddings: each rank looks up the ids of its slice, then an all-reduce follows."""

    def __init__(self, lookup: Lookup, shard: VocabShard, comm: Communicator) -> None:
        self._lookup, self._shard, self._comm = lookup, shard, comm

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return [n, hidden_size] of ids [n]."""
        if self._comm.size == 1:
            return self._lookup(token_ids)
        local = token_ids - self._shard.start
        absent = (local < 0) | (local >= self._shard.local)
        x = self._lookup(local.masked_fill(absent, 0))
        return self._comm.all_reduce(x.masked_fill_(absent.unsqueeze(-1), 0.0))


class VocabHead:
    """Computes this rank's slice of the logits."""

    def __init__(self, linear: Linear, shard: VocabShard) -> None:
        self._linear, self._shard = linear, shard

    def __call__(self, hidden: torch.Tensor, scale: float, softcap: float | None) -> torch.Tensor:
        """Return float32 [n, local] of [n, hidden_size]; columns without a token are -inf."""
        logits = self._linear.in_float32(hidden)
        if scale != 1.0:
            logits.mul_(scale)
        if softcap is not None:
            logits = torch.tanh(logits / softcap) * softcap
        if self._shard.valid < self._shard.local:
            logits[:, self._shard.valid :] = -torch.inf
        return logits


def load_embedding(load: LinearLoader, shard: VocabShard, vocab_size: int, hidden_size: int) -> VocabEmbedding:
    """Load this rank's slice of the embedding of a model without a head."""
    embed = Shard("embed", (vocab_size, hidden_size), shard.rows, Span(0, hidden_size))
    weight = load.weight([embed], n_padding=shard.local - shard.valid, dense=True)
    return VocabEmbedding(load.backend.ops.embedding(weight), shard, load.comm)


def load_vocabulary(
    load: LinearLoader, shard: VocabShard, vocab_size: int, hidden_size: int
) -> tuple[VocabEmbedding, VocabHead]:
    """Load this rank's slice of the embedding and of the head, which are one weight if they are one stored tensor."""
    ops, shape, cols = load.backend.ops, (vocab_size, hidden_size), Span(0, hidden_size)
    embed, head = (Shard(key, shape, shard.rows, cols) for key in ("embed", "head"))
    n_padding = shard.local - shard.valid
    tied = load.source.is_one("embed", "head")
    weight = load.weight([head], n_padding=n_padding, dense=tied)
    bias = load.bias([head], n_padding=n_padding)
    if tied:
        lookup, linear = ops.tied(weight, bias)
    else:
        lookup = ops.embedding(load.weight([embed], n_padding=n_padding, dense=True))
        linear = ops.linear(weight, bias)
    return VocabEmbedding(lookup, shard, load.comm), VocabHead(linear, shard)


def pad_rows(x: torch.Tensor, n_rows: int) -> torch.Tensor:
    """Return `x` with zero rows appended up to `n_rows`."""
    missing = n_rows - x.shape[0]
    return x if missing <= 0 else F.pad(x, (0,) * (2 * (x.dim() - 1)) + (0, missing))
