"""Paged attention on CUDA by torch's variable-length flash kernel, which releases before 2.13 do not have.

It was written from torch's reference and not run on a GPU, where only an older torch was available. The check at start
decides whether it is used or the attention that gathers keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch

from services.worker.backends.batch import StepBatch
from services.worker.backends.kv_cache import KvCache
from services.worker.backends.shapes import AttentionShape


@dataclass(frozen=True, slots=True)
class VarlenPlan:
    """One step's arguments of the kernel."""

    n_rows: int
    row_starts: torch.Tensor  # [n_sequences + 1] int32
    n_keys: torch.Tensor  # [n_sequences] int32
    block_tables: torch.Tensor  # [n_sequences, max_blocks] int32
    max_rows: int
    max_keys: int
    window: tuple[int, int]  # number of keys to the left and to the right of a row's own key


class PagedVarlen:
    """One kernel call for all sequences of a step, reading the cache in place."""

    def __init__(self, shape: AttentionShape) -> None:
        # Imported here, because it imports torch's compiler, which takes 1.5 s and is useless on a CPU.
        from torch.nn.attention.varlen import varlen_attn_out

        self._shape = shape
        self._kernel = varlen_attn_out

    def plan(self, batch: StepBatch, block_tokens: int, window: int | None) -> VarlenPlan:
        """Lay out the step's call for layers with `window`."""
        device = batch.block_tables.device
        return VarlenPlan(
            n_rows=batch.query_starts[-1],
            row_starts=torch.tensor(batch.query_starts, dtype=torch.int32).to(device, non_blocking=True),
            n_keys=torch.tensor(batch.context_lens, dtype=torch.int32).to(device, non_blocking=True),
            block_tables=batch.block_tables.int(),
            max_rows=max(end - start for start, end in pairwise(batch.query_starts)),
            max_keys=max(batch.context_lens),
            window=_sides(window),
        )

    def decode_plan(
        self, lengths: torch.Tensor, block_tables: torch.Tensor, n_keys: int, block_tokens: int, window: int | None
    ) -> VarlenPlan:
        """Lay out a step with one row per sequence from tensors on the device, so that it can be captured and replayed.

        `lengths` [n] are at most `n_keys`; `block_tables` [n, max_blocks].
        """
        return VarlenPlan(
            n_rows=len(lengths),
            row_starts=torch.arange(len(lengths) + 1, dtype=torch.int32, device=lengths.device),
            n_keys=lengths.int(),
            block_tables=block_tables.int(),
            max_rows=1,
            max_keys=n_keys,
            window=_sides(window),
        )

    def n_rows(self, plan: VarlenPlan) -> int:
        """Rows of `q` that `attend` may read."""
        return plan.n_rows

    def attend(self, q: torch.Tensor, cache: KvCache, layer: int, plan: VarlenPlan) -> torch.Tensor:
        """Attend with `q` [n_rows or more, n_heads * head_dim]; returns the same shape."""
        shape = self._shape
        out = q.new_zeros(q.shape)
        heads = (plan.n_rows, shape.n_heads, shape.head_dim)
        self._kernel(
            out[: plan.n_rows].view(heads),
            q[: plan.n_rows].view(heads),
            cache.layers[layer][:, :, 0],
            cache.layers[layer][:, :, 1],
            plan.row_starts,
            None,
            plan.max_rows,
            plan.max_keys,
            scale=shape.scale,
            window_size=plan.window,
            enable_gqa=shape.group > 1,
            seqused_k=plan.n_keys,
            block_table=plan.block_tables,
            num_splits=1,  # automatic splits may leave rows unwritten, and sum in an order that depends on the batch
        )
        return out


def _sides(window: int | None) -> tuple[int, int]:
    """Number of keys that a row sees to the left and to the right of its own; -1: all."""
    return -1 if window is None else window - 1, 0
