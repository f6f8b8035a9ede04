"""Chooses the first attention implementation that agrees with the reference."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from services.compute.backends.base import Attention
from services.compute.backends.batch import StepBatch
from services.compute.backends.kv_cache import KvCache
from services.compute.backends.kv_format import KvFormat
from services.compute.backends.shapes import AttentionShape, KvShape
from services.compute.backends.torch.attention import ReferenceAttention
from services.compute.backends.torch.ops import TorchOps

logger = logging.getLogger(__name__)

Candidate = Callable[[], Attention[Any]]

_BLOCK_SIZE = 16
_WINDOW = 21
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}
_OVER_CODES = 1e-3  # tolerance of attention over 8-bit codes, which may also round queries and weights
# (rows, keys): decodes with one key, a full block and several kernel blocks; a whole prompt; a later chunk.
_WORK = ((1, 1), (1, 16), (1, 700), (45, 45), (30, 93))
_PAGES = (0, 4, 9, 0, 0)  # blocks that each sequence may choose; 0: all


def choose_attention(
    choices: Sequence[Candidate],
    shape: AttentionShape,
    dtype: torch.dtype,
    device: torch.device,
    kv_format: KvFormat,
    passed: set[tuple[AttentionShape, type]] | None = None,
    *,
    chooses: bool = False,
) -> Attention[Any]:
    """Return the first attention that passes its check; warns of those that fail. Raises RuntimeError.

    `passed`: checks that an earlier choice of this process has made, to which this one adds its own. `chooses`: check
    decodes that choose their blocks as well.
    """
    passed = set() if passed is None else passed
    for make in choices:
        try:
            attention: Attention[Any] = make()
            known = (shape, type(attention)) in passed
            problem = None if known else check_attention(attention, shape, dtype, device, kv_format, chooses=chooses)
        except ImportError as error:  # the kernels' library is not installed
            logger.warning("an attention is not used: %s", error)
            continue
        except (RuntimeError, ValueError, NotImplementedError) as error:  # kernels refuse shapes and devices
            problem = str(error)
        if problem is None:
            passed.add((shape, type(attention)))
            logger.info("attention: %s", type(attention).__name__)
            return attention
        logger.warning("attention %s is not used: %s", type(attention).__name__, problem)
    raise RuntimeError(f"no attention computes {shape} in {dtype} on {device}")


def check_attention(
    attention: Attention[Any],
    shape: AttentionShape,
    dtype: torch.dtype,
    device: torch.device,
    kv_format: KvFormat,
    *,
    chooses: bool = False,
) -> str | None:
    """Run `attention` on a random paged batch; return a message about the error, or None."""
    batch = _random_batch(device)
    steps = [(batch, None), (batch, _WINDOW)]
    if chooses:
        steps.append((replace(batch, pages=_PAGES), None))
    n_blocks = int(batch.block_tables.max())
    kv_shape = KvShape(_BLOCK_SIZE, shape.n_kv_heads, shape.head_dim)
    ops = TorchOps(dtype, device)
    cache = KvCache(kv_format, 1, n_blocks, kv_shape, dtype, device, ops, summarised=chooses)
    generator = torch.Generator().manual_seed(0)
    slots = torch.arange(_BLOCK_SIZE, (n_blocks + 1) * _BLOCK_SIZE, device=device)
    cache.store(0, slots, torch.randn((len(slots), kv_shape.width), generator=generator).to(device, dtype))
    reference = ReferenceAttention(shape)
    tolerance = max(_TOLERANCE[dtype], 0.0 if kv_format.numbers else _OVER_CODES)
    for step, window in steps:
        plan = attention.plan(step, _BLOCK_SIZE, window)
        size = (attention.n_rows(plan), shape.n_heads * shape.head_dim)
        q = torch.randn(size, generator=generator).to(device, dtype)
        attended = attention.attend(q, cache, 0, plan)[: len(step.token_ids)].float()
        exact = reference.attend(q[: len(attended)].float(), cache, 0, reference.plan(step, _BLOCK_SIZE, window))
        error = (attended - exact).abs().max().item()
        if not error <= tolerance:  # NaN also fails
            return f"window {window}, pages {step.pages}: differs from the reference by {error:.2g}"
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
