"""Column- and row-parallel linear layers over a seam for the storage format of their weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from services.worker.backends.base import Linear, ModelBackend
from services.worker.backends.collectives import Communicator
from services.worker.model.loading.checkpoint import Checkpoint
from services.worker.model.loading.span import Span


@dataclass(frozen=True, slots=True)
class Shard:
    """One projection's share in a merged linear layer: `rows` and `cols` of the stored [shape] matrix `key`."""

    key: str
    shape: tuple[int, int]  # [out, in] of the whole matrix
    rows: Span
    cols: Span


class LinearMethod(Protocol):
    """How one linear layer's weight is stored, and what multiplies it. A quantized format is another implementation."""

    def create(self, n_out: int, n_in: int) -> None:
        """Allocate this rank's weight [n_out, n_in]."""
        ...

    def load(self, source: Checkpoint, shard: Shard, offset: int) -> None:
        """Read `shard` into the output rows from `offset` on."""
        ...

    def finish(self, bias: torch.Tensor | None) -> Linear:
        """Return the product with the weight, in the layout that it wants. `bias`: [n_out]."""
        ...


MakeMethod = Callable[[ModelBackend], LinearMethod]


class Unquantized:
    """A weight of the backend's dtype."""

    def __init__(self, backend: ModelBackend) -> None:
        self._backend = backend

    def create(self, n_out: int, n_in: int) -> None:
        """Allocate this rank's weight [n_out, n_in]."""
        self._weight = torch.empty(n_out, n_in, dtype=self._backend.dtype, device=self._backend.device)

    def load(self, source: Checkpoint, shard: Shard, offset: int) -> None:
        """Copy `shard` into the output rows from `offset` on."""
        part = source.matrix(shard.key, shard.shape, shard.rows, shard.cols)
        self._weight[offset : offset + len(shard.rows)].copy_(part)

    def finish(self, bias: torch.Tensor | None) -> Linear:
        """Return the backend's product."""
        return self._backend.ops.linear(self._weight, bias)


@dataclass(frozen=True, slots=True)
class LinearLoader:
    """Builds linear layers of one rank from a checkpoint."""

    source: Checkpoint
    comm: Communicator
    backend: ModelBackend
    make: MakeMethod = Unquantized

    def share(self, size: int) -> Span:
        """Return this rank's share of a dimension that the ranks divide."""
        step = size // self.comm.size
        return Span(self.comm.rank * step, (self.comm.rank + 1) * step)

    def column_parallel(self, keys: Sequence[str], n_out: int, n_in: int) -> Linear:
        """Merge projections of `n_out` rows each whose outputs the ranks divide. No collective follows."""
        rows, cols = self.share(n_out), Span(0, n_in)
        return self.build([Shard(key, (n_out, n_in), rows, cols) for key in keys])

    def row_parallel(self, key: str, n_out: int, n_in: int) -> Linear:
        """Load a projection whose inputs the ranks divide: its outputs must be all-reduced. Rank 0 adds the bias."""
        return self.build([Shard(key, (n_out, n_in), Span(0, n_out), self.share(n_in))], bias=self.comm.rank == 0)

    def replicated(self, key: str, n_out: int, n_in: int) -> Linear:
        """Load a projection that every rank computes in full."""
        return self.build([Shard(key, (n_out, n_in), Span(0, n_out), Span(0, n_in))])

    def build(self, shards: Sequence[Shard], *, bias: bool = True, n_padding: int = 0) -> Linear:
        """Merge `shards` by rows, below them `n_padding` rows of unspecified values."""
        method = self.make(self.backend)
        n_out = sum(len(shard.rows) for shard in shards)
        method.create(n_out + n_padding, len(shards[0].cols))
        offset = 0
        for shard in shards:
            method.load(self.source, shard, offset)
            offset += len(shard.rows)
        return method.finish(self._bias(shards) if bias else None)

    def _bias(self, shards: Sequence[Shard]) -> torch.Tensor | None:
        keys = [(f"{shard.key}.bias", shard) for shard in shards]
        if keys[0][0] not in self.source:
            return None
        parts = [self.source.vector(key, shard.shape[0], shard.rows) for key, shard in keys]
        return torch.cat(parts).to(self.backend.device, self.backend.dtype)
