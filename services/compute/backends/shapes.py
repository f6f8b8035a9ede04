"""The sizes of one rank's attention, of its cache and of its experts; free of torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """One rank's heads."""

    n_heads: int
    n_kv_heads: int
    head_dim: int
    scale: float
    softcap: float | None
    slopes: tuple[float, ...] = ()  # slopes of the heads' linear bias over the distance to a key (ALiBi); (): none
    # [n_layers][n_heads]: the score of one more key, whose value is 0 (attention sinks); (): none
    sinks: tuple[tuple[float, ...], ...] = ()

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.n_heads // self.n_kv_heads


@dataclass(frozen=True, slots=True)
class KvShape:
    """One rank's heads in a layer, and the positions of a block."""

    block_tokens: int
    n_kv_heads: int
    head_dim: int

    @property
    def width(self) -> int:
        """Numbers of a token in a layer: K, then V."""
        return 2 * self.n_kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class KvSize:
    """The shape of a token's entry in the cache."""

    bits: int  # per number
    head: int = 0  # bytes stored with the numbers of a token's head of K or V


@dataclass(frozen=True, slots=True)
class StatePart:
    """A part of a layer's state of one sequence, on one rank."""

    shape: tuple[int, ...]
    exact: bool = False  # in float32, not in the dtype of the computation

    def size(self, itemsize: int) -> int:
        """Return its bytes; `itemsize` is that of the dtype of the computation."""
        return math.prod(self.shape) * (4 if self.exact else itemsize)


@dataclass(frozen=True, slots=True)
class StateFormat:
    """Sizes of the state of a sequence on one rank, which do not depend on its length."""

    layers: tuple[tuple[StatePart, ...], ...]  # the parts of each layer; () for layers without a state

    def row_bytes(self, itemsize: int) -> int:
        """Return the bytes of a sequence's state; 0: the model has none."""
        return sum(part.size(itemsize) for layer in self.layers for part in layer)


@dataclass(frozen=True, slots=True)
class ExpertRouting:
    """How a mixture's router chooses experts for a row: those with the highest scores."""

    n_active: int  # experts that a row is sent to
    normalise: bool  # divide the weights of those by their sum
    scores: Literal["softmax", "sigmoid", "sparsemixer"] = "softmax"
    corrected: bool = False  # a stored number for each expert is added to its score for the choice, not for its weight
    n_groups: int = 1  # groups of experts, in order
    n_kept_groups: int = 1  # only experts of the best groups can be chosen
    group_score: Literal["max", "top2"] = "max"  # highest score of the group's experts, or sum of the two highest
    scale: float = 1.0  # factor of the weights
    on_inputs: bool = False  # the weights are factors of the experts' inputs, not of their results
    jitter: float = 0.0  # sparsemixer: experts whose logits are less than 2 * jitter below the best share its weight


@dataclass(frozen=True, slots=True)
class ExpertsShape:
    """One rank's experts of a mixture, and how rows are sent to those of all ranks."""

    numbers: range  # this rank's range among all experts
    hidden_size: int
    ffn_size: int
    routing: ExpertRouting
    gated: bool = True  # their first product is that of the gate, then that of `up`; False: that of `up` alone
