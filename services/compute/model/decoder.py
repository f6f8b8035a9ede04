"""The decoder of all models: a stack of layers, configured by a ModelSpec."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from services.compute.backends.base import (
    Attention,
    Computations,
    ModelBackend,
    NoGraph,
    Norm,
    Ops,
    Rope,
    Step,
    StepGraphs,
)
from services.compute.backends.batch import AdapterRows, StepBatch
from services.compute.backends.collectives import Communicator
from services.compute.backends.decodes import Decodes, NoDecodes, Tokens
from services.compute.backends.frames import FrameAttention, StepFrames
from services.compute.backends.kv_cache import KvCache, StepRows
from services.compute.backends.shapes import KvShape
from services.compute.backends.states import StatePlan, StateStore
from services.compute.model.layers.adapters import AdapterLayers, pad_adapters
from services.compute.model.layers.attention import WantedRows
from services.compute.model.layers.chunks import reached
from services.compute.model.layers.embedding import VocabEmbedding, VocabHead, VocabShard, pad_rows
from services.compute.model.layers.head import Head
from services.compute.model.spec import LayerSpec, ModelError, ModelSpec, Reach, SumFactors


@dataclass(frozen=True, slots=True)
class LayerNorms:
    """The norms of a layer; None for norms that the model does not have."""

    attn: Norm | None
    mlp: Norm | None
    attn_post: Norm | None
    mlp_post: Norm | None


@dataclass(frozen=True, slots=True)
class Residual:
    """The residual stream, [n_rows, hidden_size], and what the next norm makes of it, if that is computed already."""

    x: torch.Tensor
    normed: torch.Tensor | None = None

    def with_added(self, rows: torch.Tensor, added: torch.Tensor, norm: Norm | None) -> Residual:
        """Return the stream with `added` [n, hidden_size] in `rows` [n] and their `norm`; others keep their bits."""
        changed = self.x[rows] + added.to(self.x.dtype)
        normed = None if self.normed is None or norm is None else self.normed.index_copy(0, rows, norm(changed))
        return Residual(self.x.index_copy(0, rows, changed), normed)


class Mixing(Protocol):
    """The part of a layer in which rows of a sequence see each other: attention, or what keeps a state."""

    def project(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """Write what later rows need; return what `attend` needs of each row, [n_rows, ...]."""

    def attend(self, q: torch.Tensor, step: Step) -> torch.Tensor:
        """Return the result of these rows, [n_rows, hidden_size], to be summed over the ranks."""


class Layer(Protocol):
    """A layer of the residual stream."""

    @property
    def norm(self) -> Norm | None:
        """The norm of the layer's input, if the layer before may compute it."""

    def advance(
        self, stream: Residual, step: Step, wanted: WantedRows | None = None, following: Norm | None = None
    ) -> Residual:
        """Return the residual stream after this layer, or only that of the rows `wanted`; it may be overwritten.

        `following`: the norm that comes next, if it is to be computed with this layer's last sum.
        """


class DecoderLayer:
    """A mixer and an MLP around a residual stream."""

    def __init__(
        self,
        spec: ModelSpec,
        layer: LayerSpec,
        mixer: Mixing | None,
        mlp: Callable[[torch.Tensor, AdapterRows | None], torch.Tensor] | None,
        norms: LayerNorms,
        ops: Ops,
    ) -> None:
        """`mixer`, `mlp`: None for layers without; a layer has one of them at least."""
        self._mixer, self._mlp, self._norms, self._ops = mixer, mlp, norms, ops
        self._parallel, self._shared_norm = spec.parallel_residual, spec.shared_norm
        self._mixing_sum, self._mlp_sum, self._sum_norm = layer.mixing_sum, layer.mlp_sum, spec.sum_norm

    @property
    def norm(self) -> Norm | None:
        """The norm of the layer's input."""
        return self._norms.mlp if self._mixer is None else self._norms.attn

    def __call__(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """Return the residual stream after this layer, [n_rows, hidden_size]; `x` may be overwritten."""
        return self.advance(Residual(x), step).x

    def advance(
        self, stream: Residual, step: Step, wanted: WantedRows | None = None, following: Norm | None = None
    ) -> Residual:
        """Return the residual stream after this layer, as `Layer.advance` does."""
        x, norms, normed = stream.x, self._norms, stream.normed
        if normed is None:
            normed = self.norm(x) if self.norm else x
        if self._mixer is None:
            if wanted is not None:
                x, normed, step = wanted.of(x), wanted.of(normed), wanted.step
            return self._through_mlp(Residual(x, normed), step, following)
        q = self._mixer.project(normed, step)
        if wanted is not None:
            x, q, step = wanted.of(x), wanted.of(q), wanted.step
        attended = self._mixer.attend(q, step)
        if self._parallel:
            assert self._mlp is not None
            if self._shared_norm:
                normed = normed if wanted is None else wanted.of(normed)
            else:
                normed = norms.mlp(x) if norms.mlp else x
            added = attended + self._mlp(normed, step.adapters)
            return self._add(x, step.reduce(added), self._mixing_sum, None, following)
        then = following if self._mlp is None else norms.mlp
        between = self._add(x, step.reduce(attended), self._mixing_sum, norms.attn_post, then)
        return between if self._mlp is None else self._through_mlp(between, step, following)

    def _through_mlp(self, between: Residual, step: Step, following: Norm | None) -> Residual:
        assert self._mlp is not None
        added = self._mlp(between.x if between.normed is None else between.normed, step.adapters)
        return self._add(between.x, step.reduce(added), self._mlp_sum, self._norms.mlp_post, following)

    def _add(
        self, x: torch.Tensor, added: torch.Tensor, factors: SumFactors, norm: Norm | None, following: Norm | None
    ) -> Residual:
        """Add to the stream, whose `norm` is that of the sum or of what is added, and compute the `following` norm."""
        if factors.alpha != 1.0:
            x = x * factors.alpha
        if norm and self._sum_norm:
            x = norm(self._ops.add(x, added, factors.beta))
            return Residual(x, following(x) if following else None)
        added = norm(added) if norm else added
        if following is None:
            return Residual(self._ops.add(x, added, factors.beta))
        return Residual(*self._ops.add_norm(x, added, factors.beta, following))


@dataclass(frozen=True, slots=True)
class Tables:
    """Tables by position, and the distinct reaches and ropes of the layers."""

    max_positions: int  # length of the longest sequence
    ropes: tuple[Rope, ...]
    reaches: tuple[Reach, ...]
    positions: torch.Tensor | None  # learned, [max_positions, hidden_size]
    token_types: torch.Tensor | None = None  # learned, [n_token_types, hidden_size]


class Decoder:
    """One rank's share of a transformer."""

    def __init__(
        self,
        spec: ModelSpec,
        comm: Communicator,
        backend: ModelBackend,
        embed: VocabEmbedding,
        layers: list[Layer],
        embed_norm: Norm | None,
        norm: Norm,
        head: VocabHead | None,
        vocabulary: VocabShard,
        tables: Tables,
        attention: Attention[Any] | None,
        weight_formats: Mapping[str, str],
        adapters: AdapterLayers,
        classifier: Head = (),
        frames: FrameAttention | None = None,
    ) -> None:
        """`attention`: None if no layer attends. `frames`: None if no row attends to a later one.

        `weight_formats`: how the device keeps weights, in words, by their name in every layer.

        `classifier`: layers over the pooled states; () if the model has none.
        """
        self.spec, self.weight_formats, self.classifier = spec, weight_formats, classifier
        self.vocab_local = vocabulary.local
        self.logit_shard = backend.ops.logit_shard(vocabulary.start, vocabulary.local)
        self._embed, self._embed_norm, self._layers, self._norm, self._head = embed, embed_norm, layers, norm, head
        self._comm, self._backend, self._tables, self._attention = comm, backend, tables, attention
        self._frames = frames
        # For `_graphs_of`, by whether rows of a step have adapters, and whether they choose the blocks that they read.
        self._graphs: dict[tuple[bool, bool], StepGraphs] = {}
        self._graphs_of: KvCache | None = None
        self.adapters = adapters

    @property
    def exact_chunks(self) -> bool:
        """Whether a row has the same bits as one of several of its sequence and as a decode."""
        return self._attention is not None and self._attention.exact_chunks

    def make_cache(self, n_blocks: int, block_tokens: int, state_rows: int = 0, *, summarised: bool = False) -> KvCache:
        """Allocate a cache of `n_blocks` and the null block; a bidirectional model keeps only a step's own rows.

        `state_rows`: number of states, if layers keep any. `summarised`: rows may choose the blocks that they read.
        Raises ModelError for blocks that cross chunks.
        """
        if self.spec.bidirectional:
            return StepRows(self._kv_shape(block_tokens))
        for reach in self._tables.reaches:
            if reach.chunk is not None and reach.chunk % block_tokens:
                problem = f"expected a multiple of the {block_tokens} tokens of a block, found {reach.chunk}"
                raise ModelError(f"config.json: attention_chunk_size: {problem}")
        backend, shape = self._backend, self._kv_shape(block_tokens)
        of = (self.spec.n_attending, n_blocks, shape, backend.dtype, backend.device)
        states = None
        if self.spec.has_state:
            states = StateStore(self.spec.state(self._comm.size), state_rows, backend.dtype, backend.device)
        return KvCache(backend.kv_format, *of, backend.ops, states, summarised=summarised)

    @torch.inference_mode()
    def forward(self, batch: StepBatch, cache: KvCache, rows: Sequence[int] | None = None) -> torch.Tensor:
        """Compute the step's rows and write their KV; returns [n_tokens, hidden_size] after the final norm.

        With `rows`, ascending indices, only these are returned, [len(rows), hidden_size], and the last layer computes
        attention and MLP for them only.
        """
        if rows is not None and len(rows) == len(batch.token_ids):
            rows = None  # these are all
        assert rows is None or not self.spec.bidirectional, "every row of a bidirectional model is pooled"
        n_tokens, graphs = len(batch.token_ids), self._graphs_in(cache, batch)
        if cache.states is not None:
            cache.states.begin(batch.segments)
        decodes = batch.images is None and (rows is None or n_tokens == batch.n_sequences)
        if decodes and graphs.decodes.serves(batch):
            hidden = graphs.decodes.forward(self.embed(batch.token_ids, batch.positions, batch.token_types), batch)
            return hidden if rows is None else hidden[batch.rows_of(rows)]
        step, n_rows = self.lay_out(batch, cache)
        positions = pad_rows(batch.positions, n_rows)
        types = None if batch.token_types is None else pad_rows(batch.token_types, n_rows)
        x = self.embed(pad_rows(batch.token_ids, n_rows), positions, types)  # [n_rows, hidden_size]
        if batch.images is not None:
            x = x.index_copy(0, batch.images.rows, batch.images.states[:, : x.shape[1]].to(x.dtype))
        if self.spec.n_blocks:
            step = replace(step, embedded=x.clone())
        plain = step.frames is None and batch.places is None and not self._deep(batch)
        if n_rows == n_tokens and plain and graphs.layers.serves(batch):
            x = graphs.layers.forward(x, batch)
        else:
            x = self._through_layers(x, step)
        if rows is None:
            return self._finish(Residual(x), step)[:n_tokens]
        indices, alone = batch.alone(rows or [0])  # attention needs at least one row
        return self._finish(Residual(x), step, WantedRows(indices, *self.lay_out(alone, cache)))[: len(rows)]

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return float32 [n, vocab_local] of [n, hidden_size]: this rank's slice of the padded vocabulary."""
        assert self._head is not None, "a bidirectional model has no logits"
        return self._head(hidden, self.spec.logit_scale, self.spec.logit_softcap)

    def _kv_shape(self, block_tokens: int) -> KvShape:
        return KvShape(block_tokens, self.spec.kv_heads_per_rank(self._comm.size), self.spec.head_dim)

    def lay_out(self, batch: StepBatch, cache: KvCache) -> tuple[Step, int]:
        """Return the data that the layers share, and their number of rows, padded once for all layers."""
        size, reaches = cache.block_tokens, self._tables.reaches
        n_rows, attention = max(self._backend.ops.min_rows, len(batch.token_ids)), self._attention
        plans: tuple[Any, ...] = ()
        if attention is not None:
            plans = tuple(attention.plan(reached(reach, batch, size), size, reach.window) for reach in reaches)
            n_rows = max(n_rows, *(attention.n_rows(plan) for plan in plans))
        frames = self._frames_of(batch, size)
        if frames is not None:
            n_rows = max(n_rows, *(frames.attention.rows_of_tiles(tiles) for tiles in frames.tiles))
        positions = pad_rows(batch.positions, n_rows)
        if batch.places is not None:
            positions = pad_rows(batch.places.T.contiguous(), n_rows).T
        rotations = tuple(rope(positions) for rope in self._tables.ropes)
        adapters = pad_adapters(batch.adapters, n_rows)
        states = StatePlan.of(batch.segments, self._backend.device) if batch.segments else None
        return Step(batch, cache, rotations, plans, self._comm.all_reduce, adapters, states, frames), n_rows

    def _frames_of(self, batch: StepBatch, block_tokens: int) -> StepFrames | None:
        if self._frames is None or batch.images is None:
            return None
        tiles = (self._frames.frame_tiles(batch, block_tokens, reach.window) for reach in self._tables.reaches)
        return StepFrames(self._frames, tuple(tiles))

    def _through_layers(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """Compute all layers but the last, which may compute fewer rows."""
        return self._pass(Residual(x), step, None).x

    def _pass(self, stream: Residual, step: Step, following: Norm | None) -> Residual:
        """Compute all layers but the last; `following` is the norm of the last one's input."""
        norms = [layer.norm for layer in self._layers[1:-1]]
        images, deep = step.batch.images, self._deep(step.batch)
        for number, (layer, norm) in enumerate(zip(self._layers[:-1], (*norms, following), strict=False)):
            stream = layer.advance(stream, step, None, norm)
            if images is not None and number < len(deep):
                stream = stream.with_added(images.rows, deep[number], norm)
        return stream

    def _deep(self, batch: StepBatch) -> Sequence[torch.Tensor]:
        """Return what rows of images are added after each of the first layers, [n, hidden_size]."""
        return () if batch.images is None else torch.split(batch.images.states, self.spec.hidden_size, 1)[1:]

    def _finish(self, stream: Residual, step: Step, wanted: WantedRows | None = None) -> torch.Tensor:
        finished = self._layers[-1].advance(stream, step, wanted, self._norm).normed
        assert finished is not None
        return finished

    def _decode(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        if self.spec.n_blocks:
            step = replace(step, embedded=x.clone())
        return self._finish(self._pass(Residual(x), step, self._layers[-1].norm), step)

    def _graphs_in(self, cache: KvCache, batch: StepBatch) -> StepGraphs:
        """Graphs that replay steps in this cache. Steps without adapters and choices pay nothing for those with any.

        Graphs know windows, not chunks, and no rows besides the residual stream.
        """
        longest, kind = max(batch.context_lens), (batch.adapters is not None, batch.chooses)
        if any(reach.chunk is not None and longest > reach.chunk for reach in self._tables.reaches):
            return StepGraphs(NoGraph(), NoGraph())
        if cache is not self._graphs_of:
            self._graphs, self._graphs_of = {}, cache
        if kind not in self._graphs:
            if self._attention is None or self.spec.bidirectional or self.spec.n_blocks:
                self._graphs[kind] = StepGraphs(NoGraph(), NoGraph())
            else:
                self._graphs[kind] = self._backend.capture(self._computations(cache))
        return self._graphs[kind]

    def forget_cache(self) -> None:
        """Drop the graphs, and with them the cache that they replay steps in."""
        self._graphs, self._graphs_of = {}, None

    def replay_decodes(self, cache: KvCache, tokens: Tokens | None) -> Decodes:
        """Return what replays whole decodes in `cache`, with the draws of `tokens`; None: nothing is drawn."""
        if self.spec.bidirectional:
            return NoDecodes()
        return self._backend.replay_decodes(self._computations(cache), tokens)

    def _computations(self, cache: KvCache) -> Computations:
        return Computations(
            embed=self.embed,
            decode=self._decode,
            layers=self._through_layers,
            logits=self.logits,
            attention=self._attention,
            comm=self._comm,
            ropes=self._tables.ropes,
            windows=tuple(reach.window for reach in self._tables.reaches),
            cache=cache,
            hidden_size=self.spec.hidden_size,
            max_blocks=min(cache.n_blocks, -(-self._tables.max_positions // cache.block_tokens)),
            longest=min((reach.chunk for reach in self._tables.reaches if reach.chunk is not None), default=None),
        )

    def embed(
        self, token_ids: torch.Tensor, positions: torch.Tensor, types: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the rows before the first layer, [n, hidden_size], of ids, positions and token types [n].

        `types`: None if all tokens are of the first text.
        """
        x = self._embed(token_ids)
        if self.spec.embedding_scale != 1.0:
            x = x * torch.tensor(self.spec.embedding_scale, dtype=x.dtype)
        if (kinds := self._tables.token_types) is not None:
            x = x + (kinds[0] if types is None or len(kinds) == 1 else kinds.index_select(0, types))
        if self._tables.positions is not None:
            x = x + self._tables.positions.index_select(0, positions)
        return x if self._embed_norm is None else self._embed_norm(x)
