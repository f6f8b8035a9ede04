"""A device's operations of layers with a state, between their linear layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from services.compute.backends.names import Gate, GateCurve
from services.compute.backends.states import ScanTokens, StatePlan


class Convolution(Protocol):
    """A filter for each channel over its last inputs, the newest ones of which are the state.

    A row's sum is in float32 and has one order, oldest input first, so its bits do not depend on how the sequence is
    cut. `state` [rows of the store, kernel - 1, n_channels] is advanced.
    """

    def gated(self, bcx: Tensor, state: Tensor, plan: StatePlan) -> Tensor:
        """Return c * conv(b * x) [n_rows, n_channels] of `bcx` [n_rows, 3 * n_channels], which is b, c and x."""

    def activated(self, x: Tensor, state: Tensor, plan: StatePlan) -> Tensor:
        """Return silu(conv(x)) of `x` [n_rows, n_channels]."""


@dataclass(frozen=True, slots=True)
class HeadDecays:
    """The step of a token on the heads' states: state = decay * state + step * x (outer) b; y = state c + skip * x.

    The step is softplus(dt + step_bias), and the decay exp(step * rate). The tensors are [n_heads] float32.
    """

    rate: Tensor
    step_bias: Tensor
    skip: Tensor
    least_step: float
    head_dim: int
    n_groups: int  # heads of a group share b and c
    n_states: int


@dataclass(frozen=True, slots=True)
class ChannelDecays:
    """The same of channels, each with a state of n_states numbers that have a rate each."""

    rates: Tensor  # [n_channels, n_states] float32
    step_bias: Tensor  # [n_channels] float32, as is the other
    skip: Tensor


class StateSpace(Protocol):
    """The scan of a state-space layer, of heads (Mamba 2) or of channels (Mamba)."""

    def __call__(self, x: Tensor, b: Tensor, c: Tensor, dt: Tensor, state: Tensor, plan: StatePlan) -> Tensor:
        """Return the results like `x`; `state`, rows of the store, is advanced.

        Of heads: `x` [n_rows, n_heads * head_dim], `b` and `c` [n_rows, n_groups * n_states], `dt` [n_rows, n_heads].
        Of channels: `x` and `dt` [n_rows, n_channels], `b` and `c` [n_rows, n_states].
        """


@dataclass(frozen=True, slots=True)
class DeltaDecays:
    """The step of a token on the heads' states by the gated delta rule (`ScanTokens`), on this rank.

    The decay is exp(softplus(dt + step_bias) * rate). Queries and keys get the lengths key_dim^-0.5 and 1.
    """

    rate: Tensor  # [n_heads] float32
    step_bias: Tensor  # [n_heads] float32, or [n_heads, key_dim]: each number of a key has its decay
    n_key_heads: int  # n_heads // n_key_heads neighbours share the query and the key of one
    key_dim: int
    value_dim: int


class DeltaRule(Protocol):
    """The scan of a gated delta rule."""

    def __call__(self, mixed: Tensor, dt: Tensor, rate: Tensor, state: Tensor, plan: StatePlan) -> Tensor:
        """Return the heads' results, [n_rows, n_heads * value_dim]; `state`, rows of the store, is advanced.

        `mixed` [n_rows, channels]: queries, keys and values of all heads. `dt`: [n_rows, n_heads], or like keys.
        `rate` [n_rows, n_heads]: the share of a correction that is written, before its sigmoid.
        """


class GatedNorm(Protocol):
    """The gate of a layer's results, and their norm."""

    def __call__(self, y: Tensor, z: Tensor) -> Tensor:
        """Return norm(y * curve(z)), norm(y) * curve(z) or y * curve(z) of [n_rows, size]."""


class RecurrentOps(Protocol):
    """The computations of layers with a state."""

    def scan(self, tokens: ScanTokens, state: Tensor, plan: StatePlan) -> Tensor:
        """Return the results [n_rows, n_heads, height] of a step's tokens; `state`, rows of the store, is advanced."""

    def convolution(self, weight: Tensor, bias: Tensor | None) -> Convolution:
        """Return the causal convolution with `weight` [n_channels, kernel] and `bias` [n_channels], both float32."""

    def state_space(self, decays: HeadDecays | ChannelDecays) -> StateSpace:
        """Return the scan of a state-space layer."""

    def delta_rule(self, decays: DeltaDecays) -> DeltaRule:
        """Return the scan of a gated delta rule."""

    def gated_norm(
        self, weight: Tensor | None, n_groups: int, eps: float, gate: Gate, curve: GateCurve = "silu"
    ) -> GatedNorm:
        """Return the gate and RMS norm, of each of `n_groups`, with `weight` [size] float32; None: there is no norm."""
