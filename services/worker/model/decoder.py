"""The one decoder: a stack of layers whose switches a ModelSpec sets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from services.worker.kernels.bfloat16 import Bfloat16Kernels
from services.worker.model.attention import AttentionBackend
from services.worker.model.attention_kernels import PagedKernels
from services.worker.model.attention_layer import Attention, Kept, Step
from services.worker.model.batch import StepBatch
from services.worker.model.kv_cache import KvCache
from services.worker.model.mlp import Mlp
from services.worker.model.norm import Norm
from services.worker.model.rope import RotaryTables
from services.worker.model.spec import ModelSpec
from services.worker.model.step_replay import StepReplay
from services.worker.parallel.communicator import Communicator
from services.worker.parallel.embedding import VocabEmbedding, VocabHead, VocabShard, pad_rows


@dataclass(frozen=True, slots=True)
class LayerNorms:
    """The norms of a layer; None where the model has none."""

    attn: Norm | None
    mlp: Norm | None
    attn_post: Norm | None
    mlp_post: Norm | None


class DecoderLayer:
    """Attention and MLP around a residual stream."""

    def __init__(
        self,
        spec: ModelSpec,
        attention: Attention,
        mlp: Mlp,
        norms: LayerNorms,
        kernels: Bfloat16Kernels | None,
    ) -> None:
        self._attention, self._mlp, self._norms, self._kernels = attention, mlp, norms, kernels
        self._parallel, self._scale = spec.parallel_residual, spec.residual_scale

    def __call__(self, x: torch.Tensor, step: Step, kept: Kept | None = None) -> torch.Tensor:
        """Return the residual stream after this layer, [n_rows, hidden_size], or of the rows that are `kept`.

        `x` [n_rows, hidden_size] may be overwritten.
        """
        norms = self._norms
        q = self._attention.project(norms.attn(x) if norms.attn else x, step)
        if kept is not None:
            x, q, step = kept.of(x), kept.of(q), kept.step
        attended = self._attention.attend(q, step)
        if self._parallel:
            added = attended + self._mlp(norms.mlp(x) if norms.mlp else x)
            return self._add(x, step.reduce(added), None)
        x = self._add(x, step.reduce(attended), norms.attn_post)
        added = self._mlp(norms.mlp(x) if norms.mlp else x)
        return self._add(x, step.reduce(added), norms.mlp_post)

    def _add(self, x: torch.Tensor, added: torch.Tensor, norm: Norm | None) -> torch.Tensor:
        added = norm(added) if norm else added
        if self._kernels is not None:
            self._kernels.add_(x, added, self._scale)
            return x
        return torch.add(x, added, alpha=self._scale)


@dataclass(frozen=True, slots=True)
class Tables:
    """What is looked up by position, and the distinct windows and ropes among the layers."""

    max_positions: int  # of the longest sequence that is served
    ropes: tuple[RotaryTables, ...]
    windows: tuple[int | None, ...]
    positions: torch.Tensor | None  # learned, [max_positions, hidden_size]


# Rows of the largest steps that are replayed: with more, kernels take so long that what is between does not matter.
MAX_DECODES = 64
MAX_ROWS = 512


@dataclass(frozen=True, slots=True)
class Replays:
    """What replays steps in a cache: those with one row per sequence, and of others all layers but the last."""

    decodes: StepReplay
    layers: StepReplay


class Decoder:
    """One rank's share of a decoder-only transformer."""

    def __init__(
        self,
        spec: ModelSpec,
        comm: Communicator,
        embed: VocabEmbedding,
        layers: list[DecoderLayer],
        norm: Norm,
        head: VocabHead,
        vocabulary: VocabShard,
        tables: Tables,
        backend: AttentionBackend[Any],
        kernels: Bfloat16Kernels | None,
        min_rows: int,
    ) -> None:
        """`min_rows`: what the linear layers want at least."""
        self.spec, self.kernels = spec, kernels
        self.vocab_start, self.vocab_local = vocabulary.start, vocabulary.local
        self._embed, self._layers, self._norm, self._head = embed, layers, norm, head
        self._comm, self._tables, self._backend, self._min_rows = comm, tables, backend, min_rows
        self._replays: Replays | None = None

    @torch.inference_mode()
    def forward(self, batch: StepBatch, cache: KvCache, last_of: Sequence[int] | None = None) -> torch.Tensor:
        """Compute the step's rows, writing their keys and values: [n_tokens, hidden_size], final norm applied.

        With `last_of`, what is returned, and computed to the end, is the last row of each of these sequences:
        [len(last_of), hidden_size]. The end of a prompt's other rows is a layer without its attention and MLP.
        """
        if last_of is not None and len(last_of) == len(batch.token_ids):
            last_of = None  # they are all there is
        n_tokens, replays = len(batch.token_ids), self._replays_in(cache)
        if replays is not None and n_tokens == batch.n_sequences and replays.decodes.serves(batch):
            hidden = replays.decodes.forward(self._embedded(batch.token_ids, batch.positions), batch)
            return hidden if last_of is None else hidden[list(last_of)]
        step, n_rows = self._lay_out(batch, cache)
        positions = pad_rows(batch.positions, n_rows)
        x = self._embedded(pad_rows(batch.token_ids, n_rows), positions)  # [n_rows, hidden_size]
        if replays is not None and n_rows == n_tokens and replays.layers.serves(batch):
            x = replays.layers.forward(x, batch)
        else:
            x = self._through_layers(x, step)
        if last_of is None:
            return self._finish(x, step)[:n_tokens]
        rows, last = batch.last_rows(last_of or [0])  # no attention is made for no rows
        return self._finish(x, step, Kept(rows, *self._lay_out(last, cache)))[: len(last_of)]

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return float32 [n, vocab_local] of [n, hidden_size]: this rank's slice of the padded vocabulary."""
        return self._head(hidden, self.spec.logit_scale, self.spec.logit_softcap)

    def _lay_out(self, batch: StepBatch, cache: KvCache) -> tuple[Step, int]:
        """Return what the layers share, and how many rows they get: padding once saves it in every layer."""
        plans = tuple(self._backend.plan(batch, cache.block_size, window) for window in self._tables.windows)
        n_rows = max(self._min_rows, *(self._backend.n_rows(plan) for plan in plans))
        positions = pad_rows(batch.positions, n_rows)
        rotations = tuple(table.at(positions) for table in self._tables.ropes)
        return Step(batch, cache, rotations, plans, self._comm.all_reduce), n_rows

    def _through_layers(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """All but the last one, of whose rows some may be left out."""
        for layer in self._layers[:-1]:
            x = layer(x, step)
        return x

    def _finish(self, x: torch.Tensor, step: Step, kept: Kept | None = None) -> torch.Tensor:
        return self._norm(self._layers[-1](x, step, kept))

    def _decode(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        return self._finish(self._through_layers(x, step), step)

    def _replays_in(self, cache: KvCache) -> Replays | None:
        """What replays steps in this cache; None where attention is not our kernels'."""
        ours = isinstance(self._backend, PagedKernels) and self._backend.kernels is self.kernels
        if self.kernels is None or not ours:
            return None
        if self._replays is None or self._replays.decodes.cache is not cache:
            max_blocks = min(cache.n_blocks, -(-self._tables.max_positions // cache.block_size))
            tables = (self._tables.ropes, self._tables.windows)
            shared = (self.kernels, self._comm, *tables, cache, self.spec.hidden_size, max_blocks)
            self._replays = Replays(
                decodes=StepReplay(self._decode, *shared, max_rows=MAX_DECODES),
                layers=StepReplay(self._through_layers, *shared, max_rows=MAX_ROWS),
            )
        return self._replays

    def _embedded(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self._embed(token_ids)
        if self.spec.embedding_scale != 1.0:
            x = x * torch.tensor(self.spec.embedding_scale, dtype=x.dtype)
        if self._tables.positions is not None:
            x = x + self._tables.positions.index_select(0, positions)
        return x
