"""What a device gives the model, and a rank. Layers call `Ops` and know nothing below it.

`ModelBackend` is what a decoder is made of, `Backend` what a rank needs besides to serve it. `torch/` is the reference:
short, on any device, and what the others are tested against.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.worker.backends.batch import StepBatch
from services.worker.backends.collectives import Communicator, GroupSeat, StepCommunicator
from services.worker.backends.kv_cache import KvCache
from services.worker.backends.kv_format import KvFormat
from services.worker.backends.names import Activation
from services.worker.backends.shapes import AttentionShape
from services.worker.backends.weights import Stacked

PlanT = TypeVar("PlanT")

Elementwise = Callable[[Tensor], Tensor]
Norm = Callable[[Tensor], Tensor]  # of the last dimension
Lookup = Callable[[Tensor], Tensor]  # of rows of a table [n_rows, size] by their numbers [n]: [n, size]
Rotation = Callable[[Tensor], None]  # of the first rotary_dim elements of heads [n, n_heads, head_dim], in place
Rope = Callable[[Tensor], Rotation]  # of rows at positions [n], shared by all layers of a step
Temperatures = NDArray[np.float32]
Seeds = NDArray[np.uint64]
Positions = NDArray[np.int64]


class Linear(Protocol):
    """A product with one weight [n_out, n_in]."""

    def __call__(self, x: Tensor) -> Tensor:
        """Return x W^T + bias: [n, n_in] -> [n, n_out]."""
        ...

    def in_float32(self, x: Tensor) -> Tensor:
        """Return the same in float32: not rounded to the dtype first, where the device can do without."""
        ...


class RmsNorm(Protocol):
    """x / sqrt(mean(x^2) + eps) * weight, computed in float32 (Zhang & Sennrich, arXiv:1910.07467)."""

    def __call__(self, x: Tensor) -> Tensor:
        """Return the normalised `x`, of the same shape and dtype."""
        ...

    def write(self, x: Tensor, out: Tensor) -> None:
        """Write the normalised `x` to `out`, which may be `x`."""
        ...


class LogitShard(Protocol):
    """A rank's part of the logits: the tokens from `first_id` on.

    Logits are [n, n_columns] float32. A request is always served by the same implementation: their noise and their
    sums differ in the last bits.
    """

    first_id: int

    def sample(self, logits: Tensor, temperature: Temperatures, seeds: Seeds, positions: Positions) -> Tensor:
        """Return the key of each row's best score, [n] int64; `logits` may be overwritten.

        A score is the logit at `temperature` 0, else logit / temperature + noise of (seed, position, token).
        """
        ...

    def best(self, logits: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """Return the keys of the `width` best columns and a bound on the values of the others: [n, width], [n, 1]."""
        ...

    def mass(self, logits: Tensor) -> Tensor:
        """Return the logsumexp, [n, 1]."""
        ...


class Ops(Protocol):
    """The computations of a layer, on rows of one dtype on one device."""

    min_rows: int  # fewer are padded by every linear layer; a caller with many layers pads once instead

    def linear(self, weight: Stacked, bias: Tensor | None) -> Linear:
        """Return the product with `weight` [n_out, n_in], in the layout of the device; `bias`: [n_out]."""
        ...

    def embedding(self, weight: Stacked) -> Lookup:
        """Return the lookup of rows of `weight`."""
        ...

    def tied(self, weight: Stacked, bias: Tensor | None) -> tuple[Lookup, Linear]:
        """Return the lookup of rows of `weight` and the product with it: of one tensor, where the device can."""
        ...

    def rms_norm(self, weight: Tensor, eps: float) -> RmsNorm:
        """Return the norm with `weight`: [size], or [groups, size] for x [n, groups, size]."""
        ...

    def layer_norm(self, weight: Tensor, bias: Tensor | None, eps: float) -> Norm:
        """Return layer normalisation with `weight` [size]."""
        ...

    def rope(self, cos: Tensor, sin: Tensor) -> Rope:
        """Return the rope whose angles' `cos` and `sin` [max_positions, rotary_dim / 2] float32 are given."""
        ...

    def scatter(self, table: Tensor, places: Tensor, rows: Tensor) -> None:
        """Write `rows` [n, width] to the rows `places` [n] of `table` [n_rows, width], of one dtype."""
        ...

    def activation(self, name: Activation) -> Elementwise:
        """Return the function of an activation, for [n, size]."""
        ...

    def gate(self, name: Activation) -> Elementwise:
        """Return act(gate) * up of [n, 2 * size], gate then up: [n, size]."""
        ...

    def add(self, x: Tensor, added: Tensor, scale: float) -> Tensor:
        """Return x + scale * added, of one shape; `x` may be overwritten."""
        ...

    def logit_shard(self, first_id: int, n_columns: int) -> LogitShard:
        """Return what samples of `n_columns` columns of the logits, a multiple of 16, from token `first_id` on."""
        ...


class Attention(Protocol[PlanT]):
    """Attends over the paged cache. A plan is built once per step and window and shared by the layers."""

    def plan(self, batch: StepBatch, block_tokens: int, window: int | None) -> PlanT:
        """Lay out the step's work for layers with `window`."""
        ...

    def n_rows(self, plan: PlanT) -> int:
        """Rows of `q` that `attend` may read: the step's rows, or a few more."""
        ...

    def attend(self, q: Tensor, cache: KvCache, layer: int, plan: PlanT) -> Tensor:
        """Attend with `q` [n_rows, n_heads * head_dim], after the step's keys are in the cache.

        Returns [n_rows, n_heads * head_dim] of which the step's rows hold results.
        """
        ...


@dataclass(frozen=True, slots=True)
class Step:
    """What all layers share in one step."""

    batch: StepBatch
    cache: KvCache
    rotations: tuple[Rotation, ...]  # by rope
    plans: tuple[Any, ...]  # by window, of the attention's type
    reduce: Elementwise  # sums over the ranks, in place


# Computes a step's rows [n, hidden_size], which it may overwrite; returns as many.
Compute = Callable[[Tensor, Step], Tensor]


class StepGraph(Protocol):
    """A computation that is captured once and replayed for steps of one cache."""

    def serves(self, batch: StepBatch) -> bool:
        """Whether the step is one of those that are replayed, or captured."""
        ...

    def forward(self, x: Tensor, batch: StepBatch) -> Tensor:
        """Compute the rows `x` [n, hidden_size] of a step that is served. What it returns lasts until the next step."""
        ...


class NoGraph:
    """Serves no step: all are computed as they come."""

    def serves(self, batch: StepBatch) -> bool:
        """Whether the step is replayed."""
        return False

    def forward(self, x: Tensor, batch: StepBatch) -> Tensor:
        """No step is served. Raises NotImplementedError."""
        raise NotImplementedError("no step is replayed here")


@dataclass(frozen=True, slots=True)
class Computations:
    """A decoder's computations that may be captured, and what is the same in all of its steps."""

    decode: Compute  # all of a step with one row per sequence
    layers: Compute  # of other steps all layers but the last
    attention: Attention[Any]
    comm: Communicator
    ropes: tuple[Rope, ...]
    windows: tuple[int | None, ...]
    cache: KvCache
    hidden_size: int
    max_blocks: int  # of a sequence


@dataclass(frozen=True, slots=True)
class StepGraphs:
    """What replays steps with one row per sequence, and of others all layers but the last."""

    decodes: StepGraph
    layers: StepGraph


class Memory(Protocol):
    """The device's memory, as this process sees it."""

    def held(self) -> int:
        """Bytes that this process has allocated."""
        ...

    def available(self, ranks: int) -> int:
        """Bytes that this rank may still allocate, one of `ranks` on the machine."""
        ...


class ModelBackend(Protocol):
    """What a decoder is made of."""

    dtype: torch.dtype
    device: torch.device
    ops: Ops
    kv_format: KvFormat

    def attention(self, shape: AttentionShape) -> Attention[Any]:
        """Return the attention of a rank's heads. Raises RuntimeError where none computes them."""
        ...

    def capture(self, computations: Computations) -> StepGraphs:
        """Return what replays a decoder's steps in its cache."""
        ...


class Backend(ModelBackend, Protocol):
    """A device that ranks serve on."""

    memory: Memory
    process_group: str | None  # torch.distributed's, for several ranks; None: shared memory is enough

    def join(self, seat: GroupSeat) -> StepCommunicator:
        """Return the group's collectives as one of its ranks sees them."""
        ...
