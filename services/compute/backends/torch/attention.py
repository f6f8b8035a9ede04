"""Attention by its definition, as the reference."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from services.compute.backends.batch import StepBatch
from services.compute.backends.kv_cache import KvCache
from services.compute.backends.shapes import AttentionShape
from services.compute.backends.torch.pages import choose_blocks


@dataclass(frozen=True, slots=True)
class ReferencePlan:
    """One step's sequences, for one window."""

    batch: StepBatch
    window: int | None


class ReferenceAttention:
    """Attends one head, one sequence at a time in float32."""

    exact_chunks = False

    def __init__(self, shape: AttentionShape) -> None:
        self._shape = shape

    def plan(self, batch: StepBatch, block_tokens: int, window: int | None) -> ReferencePlan:
        """Return a plan that holds the step."""
        return ReferencePlan(batch, window)

    def n_rows(self, plan: ReferencePlan) -> int:
        """Rows of `q` that `attend` reads."""
        return plan.batch.query_starts[-1]

    def attend(self, q: torch.Tensor, cache: KvCache, layer: int, plan: ReferencePlan) -> torch.Tensor:
        """Attend with `q` [n_rows, n_heads * head_dim]; returns the same shape."""
        batch, shape = plan.batch, self._shape
        queries = q.view(-1, shape.n_heads, shape.head_dim).float()
        out = torch.zeros_like(queries)
        for index, length in enumerate(batch.context_lens):
            rows = slice(batch.query_starts[index], batch.query_starts[index + 1])
            n = -(-length // cache.block_tokens)
            tables = batch.block_tables[index, :n].expand(shape.n_kv_heads, -1)
            most = batch.pages[index] if batch.pages else 0
            if most and n > most:
                tables = choose_blocks(q[rows.start], cache.summaries[layer], tables[0], most, shape)
                length -= (n - most) * cache.block_tokens
            for kv_head, table in enumerate(tables):
                heads = range(kv_head * shape.group, (kv_head + 1) * shape.group)
                k, v = self._keys(cache, layer, table, length, kv_head)
                for head in heads:
                    out[rows, head] = self._attend(queries[rows, head], k, v, layer, head, plan.window)
        return out.flatten(1).to(q.dtype)

    def _keys(
        self, cache: KvCache, layer: int, table: torch.Tensor, length: int, kv_head: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a head's keys and values in the first `length` positions of the blocks: [length, head_dim] each."""
        positions = torch.arange(length, device=table.device)
        slots = table[positions // cache.block_tokens] * cache.block_tokens + positions % cache.block_tokens
        kv = cache.gather(layer, slots).view(length, 2, self._shape.n_kv_heads, self._shape.head_dim).float()
        return kv[:, 0, kv_head], kv[:, 1, kv_head]

    def _attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int, head: int, window: int | None
    ) -> torch.Tensor:
        """Attend with the last rows q [n_rows, head_dim] of a sequence: [n_rows, head_dim]."""
        shape, length = self._shape, len(k)
        positions = torch.arange(length, device=q.device)
        distance = positions[length - len(q) :].unsqueeze(1) - positions  # [n_rows, n_keys]
        scores = q @ k.T * shape.scale
        if shape.softcap is not None:
            scores = torch.tanh(scores / shape.softcap) * shape.softcap
        if shape.slopes:
            scores = scores - shape.slopes[head] * distance
        scores = scores.masked_fill((distance < 0) | (distance >= (window or length)), -torch.inf)
        if shape.sinks:
            sink = scores.new_full((len(scores), 1), shape.sinks[layer][head])
            scores, v = torch.cat((scores, sink), dim=-1), F.pad(v, (0, 0, 0, 1))
        return scores.softmax(-1) @ v
