"""Paged attention by our kernels, which read the cache in place; for decode and prefill."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from services.compute.backends.batch import StepBatch, long_tensor
from services.compute.backends.kv_cache import KvCache
from services.compute.backends.kv_format import Coding
from services.compute.backends.shapes import AttentionShape
from services.compute.backends.torch.pages import choose_pages
from services.compute.kernels.attention import VectorAttention
from services.compute.kernels.bfloat16 import Bfloat16Kernels
from services.compute.kernels.library import Sequences

INT8 = Coding(torch.int8, 127.0)  # codes that our kernels write and read


@dataclass(frozen=True, slots=True)
class KernelPlan:
    """One step's sequences, for one window."""

    n_rows: int
    window: int  # 0: all keys
    sequences: Sequences  # row starts, context lengths, block tables
    pages: torch.Tensor | None = None  # [n_sequences] int64, most blocks that each KV head reads; None: all


class PagedKernels:
    """Attention by one kernel for all sequences of a step."""

    exact_chunks = True

    def __init__(self, shape: AttentionShape, kernels: VectorAttention | Bfloat16Kernels) -> None:
        self._shape, self.kernels = shape, kernels

    def plan(self, batch: StepBatch, block_tokens: int, window: int | None) -> KernelPlan:
        """Lay out the step's sequences for layers with `window`."""
        starts, lengths = long_tensor(batch.query_starts), long_tensor(batch.context_lens)
        pages = long_tensor(batch.pages) if batch.pages else None
        return KernelPlan(batch.query_starts[-1], window or 0, (starts, lengths, batch.block_tables), pages)

    def n_rows(self, plan: KernelPlan) -> int:
        """Rows of `q` that `attend` reads."""
        return plan.n_rows

    def attend(self, q: torch.Tensor, cache: KvCache, layer: int, plan: KernelPlan) -> torch.Tensor:
        """Attend with `q` [n_rows, n_heads * head_dim]; returns the same shape."""
        shape = self._shape
        out = torch.empty(q.shape, dtype=q.dtype)
        sizes = (shape.n_kv_heads, shape.group, shape.head_dim, cache.block_tokens)
        numbers = (shape.scale, shape.softcap or 0.0, plan.window)
        sequences = plan.sequences
        if plan.pages is not None:
            sequences = self._choose(q, cache, layer, sequences, plan.pages)
        self.kernels.attend(q, out, cache.layers[layer], (*sizes, *numbers), sequences)
        return out

    def _choose(
        self, q: torch.Tensor, cache: KvCache, layer: int, sequences: Sequences, pages: torch.Tensor
    ) -> Sequences:
        if isinstance(self.kernels, Bfloat16Kernels):
            return self.kernels.choose_pages(q, cache.summaries[layer], sequences, pages, cache.block_tokens)
        return choose_pages(q, cache.summaries[layer], sequences, pages, self._shape, cache.block_tokens)


class PagedVectors(PagedKernels):
    """Attention in float32 or bfloat16 with head_dim a multiple of 8."""


class BlocksOf16(PagedKernels):
    """Attention whose kernel reads 16 positions at a time."""

    def plan(self, batch: StepBatch, block_tokens: int, window: int | None) -> KernelPlan:
        """Lay out the step's sequences for layers with `window`. Raises ValueError for other block sizes."""
        if block_tokens % 16:
            raise ValueError(f"blocks of {block_tokens} positions; the kernel reads 16 at a time")
        return super().plan(batch, block_tokens, window)


class PagedAmx(BlocksOf16):
    """Attention in bfloat16 with head_dim a multiple of 32."""


class PagedInt8(BlocksOf16):
    """Attention over a cache in int8, in float32 or bfloat16 with head_dim a multiple of 8."""
