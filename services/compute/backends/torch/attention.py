"""Attention by its definition, as the reference."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from services.compute.backends.batch import StepBatch
from services.compute.backends.kv_cache import KvCache
from services.compute.backends.shapes import AttentionShape


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
            key_positions = torch.arange(length, device=q.device)
            slots = batch.block_tables[index][key_positions // cache.block_tokens] * cache.block_tokens
            kv = cache.gather(layer, slots + key_positions % cache.block_tokens)
            k_heads, v_heads = kv.view(length, 2, shape.n_kv_heads, shape.head_dim).float().unbind(1)
            positions = key_positions[length - (rows.stop - rows.start) :]  # among the keys that are read
            distance = positions.unsqueeze(1) - key_positions  # [n_rows, n_keys]
            hidden = (distance < 0) | (distance >= (plan.window or length))
            for head in range(shape.n_heads):
                k, v = (part[:, head // shape.group] for part in (k_heads, v_heads))  # [n_keys, head_dim] each
                scores = queries[rows, head] @ k.T * shape.scale
                if shape.softcap is not None:
                    scores = torch.tanh(scores / shape.softcap) * shape.softcap
                if shape.slopes:
                    scores = scores - shape.slopes[head] * distance
                scores = scores.masked_fill(hidden, -torch.inf)
                if shape.sinks:
                    sink = scores.new_full((len(scores), 1), shape.sinks[layer][head])
                    scores, v = torch.cat((scores, sink), dim=-1), F.pad(v, (0, 0, 0, 1))
                out[rows, head] = scores.softmax(-1) @ v
        return out.flatten(1).to(q.dtype)
