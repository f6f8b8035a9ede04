"""Blocks of attention and an MLP whose weights several layers share, before the mixers of these (Zamba 2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from services.compute.backends.base import Attention, Norm, Step
from services.compute.backends.batch import AdapterRows
from services.compute.model.decoder import DecoderLayer, Residual
from services.compute.model.layers.adapters import Product
from services.compute.model.layers.attention import AttentionLayer, Heads, StepPlaces, WantedRows, qkv_shards
from services.compute.model.layers.linear import LinearLoader
from services.compute.model.layers.mlp import Mlp
from services.compute.model.layers.norm import load_norm
from services.compute.model.shard import Shard, Span
from services.compute.model.spec import ModelSpec


class OwnFactors:
    """A product with a shared matrix, and what one layer adds to it: B A x."""

    def __init__(self, shared: Product, first: Product, second: Sequence[Product]) -> None:
        """`first`: one A for each of `second`, merged. `second`: B of parts of the outputs, in order."""
        self._shared, self._first, self._second = shared, first, second

    def __call__(self, x: Tensor, adapters: AdapterRows | None = None) -> Tensor:
        """Return [n, n_out] of x [n, n_in]."""
        inner = self._first(x).chunk(len(self._second), dim=-1)
        own = [second(part.contiguous()) for second, part in zip(self._second, inner, strict=True)]
        return self._shared(x, adapters) + torch.cat(own, dim=-1)


@dataclass(frozen=True, slots=True)
class Block:
    """The parts that the layers of a block share."""

    norm: Norm  # normalises a row and its embedding, side by side
    qkv: Product
    o: Product
    mlp_norm: Norm
    up: Product
    down: Product


class SharedBlockLayer:
    """A layer whose mixer reads the residual plus what a shared block makes of the residual and the embedding."""

    norm: Norm | None = None  # the block's norm also needs the embedding

    def __init__(self, block: Block, attention: AttentionLayer, mlp: Mlp, out: Product, mixing: DecoderLayer) -> None:
        """`mixing`: the layer without the block."""
        self._block, self._attention, self._mlp, self._out, self._mixing = block, attention, mlp, out, mixing

    def advance(
        self, stream: Residual, step: Step, wanted: WantedRows | None = None, following: Norm | None = None
    ) -> Residual:
        """Return the residual stream after this layer, as `Layer.advance` does."""
        assert step.embedded is not None
        assert self._mixing.norm is not None
        rows = self._block.norm(torch.cat((stream.x, step.embedded), dim=-1))
        attended = step.reduce(self._attention.attend(self._attention.project(rows, step), step))
        inner = step.reduce(self._mlp(self._block.mlp_norm(attended), step.adapters))
        read = self._mixing.norm(stream.x + self._out(inner))
        return self._mixing.advance(Residual(stream.x, read), step, wanted, following)


def load_block(spec: ModelSpec, load: LinearLoader, number: int) -> Block:
    """Load what the layers of block `number` share. Raises ModelError."""
    key, hidden = f"blocks.{number}.", spec.hidden_size
    weight = load.source.vector(f"{key}block_norm", 2 * hidden).float().to(load.backend.device)
    return Block(
        load.backend.ops.rms_norm(weight, spec.norm_eps),
        load.build(qkv_shards(spec, Heads.of_rank(spec, load.comm), key)),
        load.row_parallel(f"{key}o", hidden, spec.n_heads * spec.head_dim),
        load_norm(spec, load, f"{key}mlp_norm"),
        load.column_parallel([f"{key}gate", f"{key}up"], spec.ffn_size, hidden),
        load.row_parallel(f"{key}down", hidden, spec.ffn_size),
    )


def load_shared_layer(
    spec: ModelSpec, load: LinearLoader, index: int, block: Block, attention: Attention[Any], mixing: DecoderLayer
) -> SharedBlockLayer:
    """Load what layer `index` adds to the `block` that it shares. Raises ModelError."""
    shared, heads, hidden = spec.layers[index].block, Heads.of_rank(spec, load.comm), spec.hidden_size
    assert shared is not None
    own = _OwnLoader(load, f"layers.{index}.")
    qkv = block.qkv
    if shared.attention_rank:
        shards = qkv_shards(spec, heads, own.key)
        parts = {shard.key.removeprefix(own.key): (shard.shape[0], shard.rows) for shard in shards}
        second = [{part: outputs} for part, outputs in parts.items()]
        qkv = own.factors(block.qkv, list(parts), second, spec.attention_width, shared.attention_rank)
    columns = dict.fromkeys(("gate", "up"), (spec.ffn_size, load.share(spec.ffn_size)))
    up = own.factors(block.up, ["mlp"], [columns], hidden, shared.rank)
    places = StepPlaces.of(spec, index)
    attending = AttentionLayer(heads, qkv, block.o, None, False, None, None, attention, places)
    mlp = Mlp(up, load.backend.ops.gate(spec.activation), None, block.down)
    out = load.replicated(f"{own.key}block_out", hidden, hidden)
    return SharedBlockLayer(block, attending, mlp, out, mixing)


@dataclass(frozen=True, slots=True)
class _OwnLoader:
    """Loads the factors of the layer with the keys' prefix `key`."""

    load: LinearLoader
    key: str

    def factors(
        self,
        shared: Product,
        first: Sequence[str],
        second: Sequence[Mapping[str, tuple[int, Span]]],
        n_in: int,
        rank: int,
    ) -> OwnFactors:
        """Return `shared` with factors of `rank`; `second`: for each of `first`, its outputs and this rank's rows."""
        a = self.load.build([Shard.whole(f"{self.key}{part}_first", (rank, n_in)) for part in first])
        columns = Span(0, rank)
        b = [
            self.load.build(
                [Shard(f"{self.key}{part}_second", (n, rank), rows, columns) for part, (n, rows) in outputs.items()]
            )
            for outputs in second
        ]
        return OwnFactors(shared, a, b)
