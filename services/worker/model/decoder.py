"""The one decoder: a stack of layers whose switches a ModelSpec sets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from services.worker.kernels.bfloat16 import Bfloat16Kernels
from services.worker.model.attention import AttentionBackend
from services.worker.model.attention_kernels import PagedKernels
from services.worker.model.attention_layer import Attention, Step
from services.worker.model.batch import StepBatch
from services.worker.model.decode_replay import DecodeReplay
from services.worker.model.kv_cache import KvCache
from services.worker.model.mlp import Mlp
from services.worker.model.norm import Norm
from services.worker.model.rope import RotaryTables
from services.worker.model.spec import ModelSpec
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

    def __call__(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """Return the residual stream [n_rows, hidden_size] after this layer; `x` may be overwritten."""
        norms = self._norms
        attended = self._attention(norms.attn(x) if norms.attn else x, step)
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

    ropes: tuple[RotaryTables, ...]
    windows: tuple[int | None, ...]
    positions: torch.Tensor | None  # learned, [max_positions, hidden_size]


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
        self._replay: DecodeReplay | None = None

    @torch.inference_mode()
    def forward(self, batch: StepBatch, cache: KvCache) -> torch.Tensor:
        """Compute the step's rows, writing their keys and values: [n_tokens, hidden_size], final norm applied."""
        replay = self._replay_in(cache)
        if replay is not None and replay.serves(batch):
            return replay.forward(self._embedded(batch.token_ids, batch.positions), batch, self._comm.all_reduce)
        plans = tuple(self._backend.plan(batch, cache.block_size, window) for window in self._tables.windows)
        n_tokens = len(batch.token_ids)
        # Padding once saves it in every layer.
        n_rows = max(self._min_rows, *(self._backend.n_rows(plan) for plan in plans))
        positions = pad_rows(batch.positions, n_rows)
        rotations = tuple(table.at(positions) for table in self._tables.ropes)
        step = Step(batch, cache, rotations, plans, self._comm.all_reduce)
        x = self._embedded(pad_rows(batch.token_ids, n_rows), positions)  # [n_rows, hidden_size]
        return self._through_layers(x, step)[:n_tokens]

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return float32 [n, vocab_local] of [n, hidden_size]: this rank's slice of the padded vocabulary."""
        return self._head(hidden, self.spec.logit_scale, self.spec.logit_softcap)

    def _through_layers(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        for layer in self._layers:
            x = layer(x, step)
        return self._norm(x)

    def _replay_in(self, cache: KvCache) -> DecodeReplay | None:
        """What replays decode steps in this cache; None where attention is not our kernels'."""
        ours = isinstance(self._backend, PagedKernels) and self._backend.kernels is self.kernels
        if self.kernels is None or not ours:
            return None
        if self._replay is None or self._replay.cache is not cache:
            tables = (self._tables.ropes, self._tables.windows)
            self._replay = DecodeReplay(self._through_layers, self.kernels, *tables, cache, self.spec.hidden_size)
        return self._replay

    def _embedded(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self._embed(token_ids)
        if self.spec.embedding_scale != 1.0:
            x = x * torch.tensor(self.spec.embedding_scale, dtype=x.dtype)
        if self._tables.positions is not None:
            x = x + self._tables.positions.index_select(0, positions)
        return x
