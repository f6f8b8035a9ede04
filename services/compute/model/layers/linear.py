"""Column- and row-parallel linear layers."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from services.compute.backends.base import Expert, Experts, Linear, ModelBackend
from services.compute.backends.collectives import Communicator
from services.compute.backends.names import Activation
from services.compute.backends.shapes import ExpertsShape
from services.compute.backends.weights import Dense, Rounded, Stacked, Weight
from services.compute.model.layers.adapters import AdaptedLinear, AdapterLayers
from services.compute.model.loading.checkpoint import Checkpoint
from services.compute.model.quantization import rounding_of
from services.compute.model.shard import Shard, Span
from services.compute.ranks.config import Quantization


def kind_of(key: str) -> str:
    """Return the name that a weight has in every layer: the logical key without the numbers of layer and expert."""
    return ".".join(part for part in key.removeprefix("layers.").split(".") if not part.isdigit())


@dataclass(frozen=True, slots=True)
class LinearLoader:
    """Builds linear layers of one rank from a checkpoint."""

    source: Checkpoint
    comm: Communicator
    backend: ModelBackend
    quantization: Quantization = field(default="none", kw_only=True)  # rounding of weights that are stored unquantized
    adapters: AdapterLayers = field(default_factory=AdapterLayers, kw_only=True)  # those of the layers built so far
    forms: Mapping[str, Counter[str]] = field(  # the forms in which the device keeps weights, by `kind_of`
        default_factory=lambda: defaultdict(Counter), kw_only=True
    )

    def share(self, size: int) -> Span:
        """Return this rank's share of a dimension that the ranks divide."""
        step = size // self.comm.size
        return Span(self.comm.rank * step, (self.comm.rank + 1) * step)

    def column_parallel(self, keys: Sequence[str], n_out: int, n_in: int) -> AdaptedLinear:
        """Merge projections of `n_out` rows each; the ranks divide the outputs, so no collective follows."""
        rows, cols = self.share(n_out), Span(0, n_in)
        return self.build([Shard(key, (n_out, n_in), rows, cols) for key in keys])

    def row_parallel(self, key: str, n_out: int, n_in: int) -> AdaptedLinear:
        """Load a projection whose inputs the ranks divide; its outputs need an all-reduce. Rank 0 adds the bias."""
        return self.build([Shard(key, (n_out, n_in), Span(0, n_out), self.share(n_in))], bias=self.comm.rank == 0)

    def replicated(self, key: str, n_out: int, n_in: int) -> AdaptedLinear:
        """Load a projection that every rank computes in full."""
        return self.build([Shard.whole(key, (n_out, n_in))])

    def build(self, shards: Sequence[Shard], *, bias: bool = True) -> AdaptedLinear:
        """Merge `shards` by rows."""
        return AdaptedLinear(self.linear(shards, bias=bias), self.adapters.of(shards, self.backend.ops))

    def linear(self, shards: Sequence[Shard], *, bias: bool) -> Linear:
        """Merge `shards` by rows, without what adapters add."""
        return self.backend.ops.linear(self.weight(shards), self.bias(shards) if bias else None)

    def experts(
        self, prefix: str, shape: ExpertsShape, activation: Activation, correction: torch.Tensor | None = None
    ) -> Experts:
        """Load this rank's experts, whose keys begin with `prefix` and their numbers; `correction` as in `Ops`."""
        weights = (self.expert(f"{prefix}{number}.", shape) for number in shape.numbers)
        return self.backend.ops.experts(weights, shape, activation, correction)

    def expert(self, key: str, shape: ExpertsShape) -> Expert:
        """Return the weights of one expert, whose keys begin with `key`."""
        hidden, ffn = shape.hidden_size, shape.ffn_size
        parts = ("gate", "up") if shape.gated else ("up",)
        gate_up = [Shard.whole(key + part, (ffn, hidden)) for part in parts]
        down = [Shard.whole(f"{key}down", (hidden, ffn))]
        return Expert(
            self.weight(gate_up, dense=True), self.weight(down, dense=True), self.bias(gate_up), self.bias(down)
        )

    def weight(self, shards: Sequence[Shard], *, n_padding: int = 0, dense: bool = False) -> Stacked:
        """Return the weights of `shards` concatenated by rows, followed by `n_padding` rows of zeros.

        `dense`: a device may keep them only so, as tables and experts.
        """
        parts = [self._weight(shard) for shard in shards]
        for shard, part in zip(shards, parts, strict=True):
            self.forms[kind_of(shard.key)][self.backend.ops.form(part, dense=dense)] += 1
        if n_padding:
            parts.append(Dense(torch.zeros(n_padding, len(shards[0].cols), dtype=self.backend.dtype)))
        return Stacked(tuple(parts))

    def _weight(self, shard: Shard) -> Weight:
        stored, rounding = self.source.weight(shard), rounding_of(self.quantization, shard.key)
        if rounding is None or not isinstance(stored, Dense):
            return stored
        columns = shard.cols
        if len(columns) < shard.shape[1]:  # scales are those of whole rows: all ranks have the same codes
            stored = self.source.weight(replace(shard, cols=Span(0, shard.shape[1])))
            assert isinstance(stored, Dense)
        return Rounded(stored.values, columns.start, columns.stop, rounding.bits, rounding.group)

    def bias(self, shards: Sequence[Shard], *, n_padding: int = 0) -> torch.Tensor | None:
        """Return the concatenated biases of `shards`, followed by `n_padding` zeros; None if none are stored."""
        keys = [(f"{shard.key}.bias", shard) for shard in shards]
        if keys[0][0] not in self.source:
            return None
        parts = [self.source.vector(key, shard.shape[0], shard.rows) for key, shard in keys]
        return torch.cat((*parts, torch.zeros(n_padding))).to(self.backend.device, self.backend.dtype)
