"""Interfaces of a device to the model and to a rank. Layers call `Ops` and know nothing below it.

A decoder is built from a `ModelBackend`; a `Backend` adds what a rank needs to serve the decoder. `torch/` is the
reference: it is short, runs on any device, and the others are tested against it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from services.compute.backends.batch import AdapterRows, StepBatch
from services.compute.backends.collectives import Communicator, GroupSeat, StepCommunicator
from services.compute.backends.decodes import Decodes, Tokens
from services.compute.backends.draws import Chances
from services.compute.backends.frames import FrameAttention, StepFrames
from services.compute.backends.kv_cache import CacheWriter, KvCache, Rotation
from services.compute.backends.kv_format import KvFormat
from services.compute.backends.names import Activation
from services.compute.backends.parking import Restore
from services.compute.backends.recurrent import RecurrentOps
from services.compute.backends.shapes import AttentionShape, ExpertsShape
from services.compute.backends.states import StatePlan
from services.compute.backends.transfers import Transfers
from services.compute.backends.weights import Stacked, Weight

PlanT = TypeVar("PlanT")

Elementwise = Callable[[Tensor], Tensor]
PerHead = Callable[[Tensor], Tensor]  # a product for each head: [n, n_heads, n_in] -> [n, n_heads, n_out]
Norm = Callable[[Tensor], Tensor]  # normalises the last dimension
Lookup = Callable[[Tensor], Tensor]  # maps row numbers [n] to rows [n, size] of a table [n_rows, size]
Rope = Callable[[Tensor], Rotation]  # maps positions [n] to the rotation that all layers of a step share


class Linear(Protocol):
    """A product with one weight [n_out, n_in]."""

    def __call__(self, x: Tensor) -> Tensor:
        """Return x W^T + bias: [n, n_in] -> [n, n_out]."""

    def in_float32(self, x: Tensor) -> Tensor:
        """Return the product in float32, without rounding to the dtype first if the device supports it."""


class LowRank(Protocol):
    """The sum that adapters add to a linear layer's outputs: B A x, with factors by slot (LoRA, arXiv:2106.09685)."""

    def put(self, slot: int, a: Tensor, b: Tensor) -> None:
        """Set the factors of `slot`: `a` [rank, n_in], `b` [n_out, rank]; the scale is part of `b`."""

    def clear(self, slot: int) -> None:
        """Remove the factors of `slot`, if it has any; its rows then get nothing."""

    def add_(self, y: Tensor, x: Tensor, adapters: AdapterRows) -> None:
        """Add the product with each row of `x` [n, n_in] and its slot's factors to `y` [n, n_out]."""


class RmsNorm(Protocol):
    """x / sqrt(mean(x^2) + eps) * weight, computed in float32 (Zhang & Sennrich, arXiv:1910.07467)."""

    def __call__(self, x: Tensor) -> Tensor:
        """Return the normalised `x`, of the same shape and dtype."""

    def write(self, x: Tensor, out: Tensor) -> None:
        """Write the normalised `x` to `out`, which may be `x`."""


@dataclass(frozen=True, slots=True)
class Expert:
    """The weights of a gated expert."""

    gate_up: Stacked  # [2 * ffn_size, hidden_size]
    down: Stacked  # [hidden_size, ffn_size]
    gate_up_bias: Tensor | None = None  # [2 * ffn_size]
    down_bias: Tensor | None = None  # [hidden_size]


class Experts(Protocol):
    """A rank's experts of a mixture."""

    def __call__(self, x: Tensor, logits: Tensor) -> Tensor:
        """Return the rank's summand of [n, hidden_size] for rows x [n, hidden_size].

        `logits` [n, n_experts] are the router's: experts of all ranks.
        """


class LogitShard(Protocol):
    """A rank's part of the logits: the tokens from `first_id` on.

    Logits are [n, n_columns] float32. The noise and the sums of different implementations differ in the last bits, so
    one implementation must serve a whole request.
    """

    first_id: int

    def sample(self, logits: Tensor, chances: Chances) -> Tensor:
        """Return the key of each row's best score, [n] int64; `logits` may be overwritten.

        A score is the logit at temperature 0, otherwise logit / temperature + noise of (seed, position, token).
        """

    def best(self, logits: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """Return the keys of the `width` best columns and a bound on the values of the others: [n, width], [n, 1]."""

    def mass(self, logits: Tensor) -> Tensor:
        """Return the logsumexp, [n, 1]."""


class Ops(CacheWriter, RecurrentOps, Protocol):
    """The computations of a layer, on rows of one dtype on one device."""

    min_rows: int  # every linear layer pads fewer rows; a caller with many layers pads them once

    def form(self, weight: Weight, *, dense: bool = False) -> str:
        """Return in words how the device keeps `weight`; `dense`: that of a table or an expert, not of `linear`."""

    def linear(self, weight: Stacked, bias: Tensor | None) -> Linear:
        """Return the product with `weight` [n_out, n_in], in the layout of the device; `bias`: [n_out]."""

    def per_head(self, weights: Tensor) -> PerHead:
        """Return the product of each head with its own matrix of `weights` [n_heads, n_out, n_in]."""

    def low_rank(self, n_out: int, n_in: int, slots: int, max_rank: int) -> LowRank:
        """Return empty factors of `slots` adapters for a layer [n_out, n_in]."""

    def embedding(self, weight: Stacked) -> Lookup:
        """Return the lookup of rows of `weight`."""

    def tied(self, weight: Stacked, bias: Tensor | None) -> tuple[Lookup, Linear]:
        """Return the lookup of rows of `weight` and the product with it, sharing one tensor if the device can."""

    def rms_norm(self, weight: Tensor, eps: float) -> RmsNorm:
        """Return the norm with `weight`: [size], or [groups, size] for x [n, groups, size]."""

    def layer_norm(self, weight: Tensor, bias: Tensor | None, eps: float) -> Norm:
        """Return layer normalisation with `weight` [size]."""

    def rope(self, cos: Tensor, sin: Tensor) -> Rope:
        """Return the rope with the angles' `cos` and `sin` [max_positions, rotary_dim / 2] float32."""

    def activation(self, name: Activation) -> Elementwise:
        """Return the function of an activation, for [n, size]."""

    def xielu(self, alpha_p: float, alpha_n: float, beta: float) -> Elementwise:
        """Return xIELU (arXiv:2411.13010) with these stored numbers, for [n, size]."""

    def sigmoid(self, x: Tensor) -> Tensor:
        """Return 1 / (1 + exp(-x)) of [n, size]."""

    def gate(self, name: Activation) -> Elementwise:
        """Return act(gate) * up of [n, 2 * size], gate then up: [n, size]."""

    def experts(
        self, weights: Iterable[Expert], shape: ExpertsShape, activation: Activation, correction: Tensor | None = None
    ) -> Experts:
        """Return the experts with these `weights`, one after the other for each of `shape.numbers`.

        `correction` [n_experts] of all ranks' experts, if the routing is corrected.
        """

    def add(self, x: Tensor, added: Tensor, scale: float) -> Tensor:
        """Return x + scale * added, of one shape; `x` may be overwritten."""

    def add_norm(self, x: Tensor, added: Tensor, scale: float, norm: Norm) -> tuple[Tensor, Tensor]:
        """Return x + scale * added, and its `norm`; `x` [n, size] may be overwritten."""

    def logit_shard(self, first_id: int, n_columns: int) -> LogitShard:
        """Return the shard of `n_columns` columns of the logits, a multiple of 16, from token `first_id` on."""


class Attention(Protocol[PlanT]):
    """Attends over the paged cache. A plan is built once per step and window and shared by the layers."""

    exact_chunks: bool  # a row has the same bits among the rows of its sequence and in a sequence of its own

    def plan(self, batch: StepBatch, block_tokens: int, window: int | None) -> PlanT:
        """Lay out the step's work for layers with `window`."""

    def n_rows(self, plan: PlanT) -> int:
        """Rows of `q` that `attend` may read: the step's rows, or a few more."""

    def attend(self, q: Tensor, cache: KvCache, layer: int, plan: PlanT) -> Tensor:
        """Attend with `q` [n_rows, n_heads * head_dim]; the step's keys must be in the cache.

        Returns [n_rows, n_heads * head_dim]; only the step's rows hold results.
        """


@dataclass(frozen=True, slots=True)
class Step:
    """Data that all layers share in one step."""

    batch: StepBatch
    cache: KvCache
    rotations: tuple[Rotation, ...]  # by rope
    plans: tuple[Any, ...]  # the attention's plans, by window
    reduce: Elementwise  # sums over the ranks, in place
    adapters: AdapterRows | None = None  # adapters of the rows that the layers compute, padding included
    states: StatePlan | None = None  # how layers with a state compute the rows; None: the model has none
    frames: StepFrames | None = None  # None: a row sees no later one
    embedded: Tensor | None = None  # the rows before the first layer, if later layers read them


# Maps a step's rows [n, hidden_size], which it may overwrite, to rows of the same number.
Compute = Callable[[Tensor, Step], Tensor]


class StepGraph(Protocol):
    """A computation that is captured once and replayed for steps of one cache."""

    def serves(self, batch: StepBatch) -> bool:
        """Whether `forward` can replay or capture this step."""

    def forward(self, x: Tensor, batch: StepBatch) -> Tensor:
        """Compute the rows `x` [n, hidden_size] of a step that is served. The result is valid until the next step."""


class NoGraph:
    """Serves no step; all steps are computed without a graph."""

    def serves(self, batch: StepBatch) -> bool:
        """Return False."""
        return False

    def forward(self, x: Tensor, batch: StepBatch) -> Tensor:
        """Raises NotImplementedError."""
        raise NotImplementedError("no step is replayed here")


@dataclass(frozen=True, slots=True)
class Computations:
    """A decoder's computations that may be captured, and the data common to all its steps."""

    embed: Callable[[Tensor, Tensor], Tensor]  # rows [n, hidden_size] of ids and positions [n]
    decode: Compute  # all layers and the final norm, for a step of which every row is wanted
    layers: Compute  # all layers but the last, for other steps
    logits: Callable[[Tensor], Tensor]  # [n, vocab_local] of what `decode` returns
    attention: Attention[Any] | None  # None: no layer attends
    comm: Communicator
    ropes: tuple[Rope, ...]
    windows: tuple[int | None, ...]
    cache: KvCache
    hidden_size: int
    max_blocks: int  # largest number of blocks of a sequence
    longest: int | None = None  # most keys of a sequence before chunks hide some, besides `windows`; None: any


@dataclass(frozen=True, slots=True)
class StepGraphs:
    """Graphs for steps of which every row is wanted, and for all layers but the last of other steps."""

    decodes: StepGraph
    layers: StepGraph


class Memory(Protocol):
    """The device's memory."""

    def held(self) -> int:
        """Bytes that this process has allocated."""

    def release(self) -> None:
        """Give freed memory back, so that others may allocate it."""

    def rest(self) -> None:
        """Give back what this process takes only while it computes."""

    def available(self, ranks: int) -> int:
        """Bytes that this rank may still allocate, with `ranks` ranks on the machine."""


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """The memory of a device that has its own, in bytes."""

    total: int
    free: int
    reserved: int  # by torch for this process, tensors included
    peak: int  # most that was reserved since the report before


@runtime_checkable
class ParkingMemory(Memory, Protocol):
    """Memory whose weights can wait elsewhere as the kernels take them."""

    def park(self) -> Restore:
        """Move all tensors away: to the host's memory, or to a file; the returned function brings them back.

        Raises OSError, and moves none, if there is no room.
        """


@runtime_checkable
class DeviceMemory(ParkingMemory, Protocol):
    """Memory whose KV cache is sized by measuring steps."""

    def report(self) -> MemoryReport:
        """Return the numbers once all computations have ended."""

    def pin(self, area: memoryview) -> None:
        """Lock memory of the host for this process's life, so that the device copies without a buffer between."""


class ModelBackend(Protocol):
    """A device's building blocks of a decoder."""

    dtype: torch.dtype
    device: torch.device
    ops: Ops
    kv_format: KvFormat

    def attention(self, shape: AttentionShape) -> Attention[Any]:
        """Return the attention for a rank's heads. Raises RuntimeError if no implementation supports them."""

    def bidirectional(self, shape: AttentionShape) -> Attention[Any]:
        """Return the attention of an encoder, over a step's own rows. Raises ValueError for scores without one."""

    def frames(self, shape: AttentionShape) -> FrameAttention:
        """Return the attention of rows of frames, for decoders whose rows of a frame attend to each other."""

    def capture(self, computations: Computations) -> StepGraphs:
        """Return graphs that replay a decoder's steps in its cache, between its embedding and its head."""

    def replay_decodes(self, computations: Computations, tokens: Tokens | None) -> Decodes:
        """Return what replays whole decodes, from ids to the draws of `tokens`; None: nothing is drawn."""


class Backend(ModelBackend, Protocol):
    """A device that ranks serve on."""

    memory: Memory
    transfers: Transfers
    process_group: str | None  # torch.distributed's backend for several ranks; None: shared memory is enough

    @property
    def replayed_rows(self) -> Sequence[int]:
        """The sizes of steps with prompts that are captured at their first use, ascending; () if that is quick."""

    def join(self, seat: GroupSeat) -> StepCommunicator:
        """Return the collectives of the group for the rank in `seat`."""
