"""Attention as its definition says, and the check of a backend against it."""

from __future__ import annotations

from typing import Any

import torch

from services.worker.model.attention import AttentionBackend, AttentionShape
from services.worker.model.batch import StepBatch
from services.worker.model.kv_cache import KvCache

_BLOCK_SIZE = 16
_WINDOW = 21
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}
# (rows, keys): decodes of one key, of a full block and of several kernel blocks; a whole prompt; a later chunk.
_WORK = ((1, 1), (1, 16), (1, 700), (45, 45), (30, 93))


def attend_reference(
    q: torch.Tensor, cache: KvCache, layer: int, batch: StepBatch, shape: AttentionShape, window: int | None
) -> torch.Tensor:
    """Attend one head, one sequence at a time in float32: [n_tokens, n_heads * head_dim]."""
    out = torch.empty(len(batch.token_ids), shape.n_heads, shape.head_dim, device=q.device)
    queries = q.view(-1, shape.n_heads, shape.head_dim).float()
    for index, length in enumerate(batch.context_lens):
        rows = slice(batch.query_starts[index], batch.query_starts[index + 1])
        blocks = batch.block_tables[index]
        key_positions = torch.arange(length, device=q.device)
        distance = batch.positions[rows].unsqueeze(1) - key_positions  # [n_rows, n_keys]
        hidden = (distance < 0) | (distance >= (window or length))
        for head in range(shape.n_heads):
            k, v = (
                part[layer][blocks, :, head // shape.group].flatten(0, 1)[:length].float()  # [n_keys, head_dim]
                for part in (cache.k, cache.v)
            )
            scores = queries[rows, head] @ k.T * shape.scale
            if shape.softcap is not None:
                scores = torch.tanh(scores / shape.softcap) * shape.softcap
            out[rows, head] = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v
    return out.flatten(1)


def check_backend(
    backend: AttentionBackend[Any], shape: AttentionShape, dtype: torch.dtype, device: torch.device
) -> str | None:
    """Run `backend` on a random paged batch; return what is wrong with it, or None."""
    batch = _random_batch(device)
    n_blocks = int(batch.block_tables.max())
    cache = KvCache.of_shape(1, n_blocks, _BLOCK_SIZE, shape.n_kv_heads, shape.head_dim, dtype, device)
    generator = torch.Generator().manual_seed(0)
    cache.kv[0][1:] = torch.randn(cache.kv[0][1:].shape, generator=generator).to(device, dtype)
    for window in (None, _WINDOW):
        plan = backend.plan(batch, _BLOCK_SIZE, window)
        size = (backend.n_rows(plan), shape.n_heads * shape.head_dim)
        q = torch.randn(size, generator=generator).to(device, dtype)
        found = backend.attend(q, cache, 0, plan)[: len(batch.token_ids)].float()
        error = (found - attend_reference(q[: len(found)], cache, 0, batch, shape, window)).abs().max().item()
        if not error <= _TOLERANCE[dtype]:  # NaN is wrong, too
            return f"window {window}: differs from the reference by {error:.2g}"
    return None


def _random_batch(device: torch.device) -> StepBatch:
    n_blocks = [-(-n_keys // _BLOCK_SIZE) for _, n_keys in _WORK]
    order = iter((torch.randperm(sum(n_blocks), generator=torch.Generator().manual_seed(0)) + 1).tolist())
    tables = torch.zeros(len(_WORK), max(n_blocks), dtype=torch.int64)
    positions, slots, starts = [], [], [0]
    for index, (n_rows, n_keys) in enumerate(_WORK):
        tables[index, : n_blocks[index]] = torch.tensor([next(order) for _ in range(n_blocks[index])])
        rows = torch.arange(n_keys - n_rows, n_keys)
        positions.append(rows)
        slots.append(tables[index, rows // _BLOCK_SIZE] * _BLOCK_SIZE + rows % _BLOCK_SIZE)
        starts.append(starts[-1] + n_rows)
    return StepBatch(
        token_ids=torch.zeros(starts[-1], dtype=torch.int64, device=device),
        positions=torch.cat(positions).to(device),
        kv_slots=torch.cat(slots).to(device),
        query_starts=tuple(starts),
        context_lens=tuple(n_keys for _, n_keys in _WORK),
        block_tables=tables.to(device),
        n_decode=sum(n_rows == 1 for n_rows, _ in _WORK),
    )
