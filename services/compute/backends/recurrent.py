"""What a device computes of layers with a state, besides `Ops.scan`: all of their work between two products."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from services.compute.backends.states import StatePlan


class Convolution(Protocol):
    """A filter for each channel over its last inputs, the newest ones of which are the state.

    A row's sum is in float32 and has one order, oldest input first, so its bits do not depend on how the sequence is
    cut. `state` [rows of the store, kernel - 1, n_channels] is advanced.
    """

    def gated(self, bcx: Tensor, state: Tensor, plan: StatePlan) -> Tensor:
        """Return c * conv(b * x) [n_rows, n_channels] of `bcx` [n_rows, 3 * n_channels], which is b, c and x."""
        ...

    def activated(self, x: Tensor, state: Tensor, plan: StatePlan) -> Tensor:
        """Return silu(conv(x)) of `x` [n_rows, n_channels]."""
        ...


@dataclass(frozen=True, slots=True)
class HeadDecays:
    """What a token does to the heads' states: state = decay * state + step * x (outer) b; y = state c + skip * x.

    The step is softplus(dt + step_bias), and the decay exp(step * rate). The tensors are [n_heads] float32.
    """

    rate: Tensor
    step_bias: Tensor
    skip: Tensor
    least_step: float
    head_dim: int
    n_groups: int  # heads of a group share b and c
    n_states: int


class StateSpace(Protocol):
    """The scan of a state-space layer whose heads decay by one number each (Mamba 2)."""

    def __call__(self, mixed: Tensor, dt: Tensor, state: Tensor, plan: StatePlan) -> Tensor:
        """Return the heads' results, [n_rows, n_heads * head_dim]; `state`, rows of the store, is advanced.

        `mixed` [n_rows, channels]: the heads' inputs x, then b and c of the groups; `dt` [n_rows, n_heads].
        """
        ...


class GatedNorm(Protocol):
    """The gate of a state-space layer's results, and their norm."""

    def __call__(self, y: Tensor, z: Tensor) -> Tensor:
        """Return norm(y * silu(z)), norm(y) * silu(z) or y * silu(z) of [n_rows, size]."""
        ...
