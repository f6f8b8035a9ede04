"""What every attention backend does, and the choice among them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from services.worker.model.batch import StepBatch
from services.worker.model.kv_cache import KvCache

PlanT = TypeVar("PlanT")


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """One rank's heads."""

    n_heads: int
    n_kv_heads: int
    head_dim: int
    scale: float
    softcap: float | None

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.n_heads // self.n_kv_heads


class AttentionBackend(Protocol[PlanT]):
    """Attends over the paged cache. A plan is built once per step and window and shared by the layers."""

    def plan(self, batch: StepBatch, block_size: int, window: int | None) -> PlanT:
        """Lay out the step's work for layers with `window`."""
        ...

    def n_rows(self, plan: PlanT) -> int:
        """Rows of `q` that `attend` may read: the step's rows, or a few more."""
        ...

    def attend(self, q: torch.Tensor, cache: KvCache, layer: int, plan: PlanT) -> torch.Tensor:
        """Attend with `q` [n_rows, n_heads * head_dim], after the step's keys are in the cache.

        Returns [n_rows, n_heads * head_dim] of which the step's rows hold results.
        """
        ...
