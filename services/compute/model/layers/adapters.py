"""Adapters of a rank's linear layers. A layer's addition needs no collective but the layer's own.

Ranks that divide a layer's outputs have all of A and their rows of B. Ranks that divide its inputs have their columns
of A and all of B, and what they add is a summand like the layer's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch.nn import functional as F

from services.compute.backends.base import Linear, LowRank, Ops
from services.compute.backends.batch import AdapterRows
from services.compute.model.adapters.peft import TENSORS
from services.compute.model.adapters.served import ADAPTED, AdapterTarget, ServedAdapter
from services.compute.model.loading.checkpoint import stored_rows
from services.compute.model.shard import Shard
from services.compute.model.spec import ModelError

AdapterTensors = Mapping[str, tuple[torch.Tensor, torch.Tensor]]  # A and B of each layer, by logical key


@dataclass(frozen=True, slots=True)
class AdaptedPart:
    """Factors of a projection of a linear layer, which may have merged several."""

    shard: Shard
    start: int  # its first output in the merged layer
    low_rank: LowRank


class Product(Protocol):
    """A linear layer whose rows may have adapters."""

    def __call__(self, x: torch.Tensor, adapters: AdapterRows | None = None) -> torch.Tensor:
        """Return [n, n_out] of x [n, n_in]."""


class AdaptedLinear:
    """A linear layer, and what the adapters of its rows add."""

    def __init__(self, linear: Linear, parts: tuple[AdaptedPart, ...]) -> None:
        self._linear, self._parts = linear, parts

    def __call__(self, x: torch.Tensor, adapters: AdapterRows | None = None) -> torch.Tensor:
        """Return [n, n_out] of x [n, n_in]."""
        y = self._linear(x)
        if adapters is not None:
            for part in self._parts:
                part.low_rank.add_(y[:, part.start : part.start + len(part.shard.rows)], x, adapters)
        return y


@dataclass(frozen=True, slots=True)
class AdapterLayers:
    """All of a rank's layers that adapters can change."""

    slots: int = 0  # adapters at a time; 0: none, and no layer has room for any
    max_rank: int = 0
    _parts: dict[str, AdaptedPart] = field(default_factory=dict)  # by logical key

    def of(self, shards: Sequence[Shard], ops: Ops) -> tuple[AdaptedPart, ...]:
        """Return the parts of a layer that merges `shards`; () if it has none that can be adapted."""
        if not self.slots:
            return ()
        parts, start = [], 0
        for shard in shards:
            if shard.key.rpartition(".")[2] in ADAPTED:
                low_rank = ops.low_rank(len(shard.rows), len(shard.cols), self.slots, self.max_rank)
                parts.append(AdaptedPart(shard, start, low_rank))
            start += len(shard.rows)
        self._parts.update({part.shard.key: part for part in parts})
        return tuple(parts)

    @torch.inference_mode()
    def read(self, adapter: ServedAdapter) -> AdapterTensors:
        """Return this rank's share of an adapter, in float32. Raises ModelError naming the tensor."""
        file, factors = adapter.folder / TENSORS, dict[str, tuple[torch.Tensor, torch.Tensor]]()
        try:
            with safe_open(file, framework="pt") as stored:
                for target in adapter.targets:
                    shard = self._parts[target.key].shard
                    a = stored.get_slice(target.factors.a)[:, shard.cols.start : shard.cols.stop]
                    a = a.to(torch.float32, copy=True)  # it must not change with the file
                    b = _rows(stored.get_slice(target.factors.b), target, shard).float() * target.factors.scale
                    if not (a.isfinite().all() and b.isfinite().all()):
                        raise ModelError(f"{file}: {target.factors.a}: not all numbers are finite")
                    factors[target.key] = a, b
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{file}: {error}") from error
        return factors

    @torch.inference_mode()
    def put(self, slot: int, tensors: AdapterTensors) -> None:
        """Put an adapter into a slot, in place of another one."""
        self.clear(slot)
        for key, (a, b) in tensors.items():
            self._parts[key].low_rank.put(slot, a, b)

    @torch.inference_mode()
    def clear(self, slot: int) -> None:
        """Remove the adapter in a slot, if there is one."""
        for part in self._parts.values():
            part.low_rank.clear(slot)


def pad_adapters(adapters: AdapterRows | None, n_rows: int) -> AdapterRows | None:
    """Return the adapters of `n_rows` rows, those beyond the step's own without any."""
    if adapters is None or len(adapters.slots) >= n_rows:
        return adapters
    return AdapterRows(F.pad(adapters.slots, (0, n_rows - len(adapters.slots)), value=-1), adapters.by_slot)


def _rows(stored: torch.Tensor, target: AdapterTarget, shard: Shard) -> torch.Tensor:
    """Return the rows of B of a part: [len(shard.rows), rank]."""
    rows, order = stored_rows(target.ref, shard.rows)
    rows_of_rank = stored[rows.start : rows.stop]
    return rows_of_rank if order is None else rows_of_rank[order]
