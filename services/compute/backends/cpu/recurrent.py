"""Layers with a state by our kernels, each in one call: a step of decodes is replayed."""

from __future__ import annotations

import torch
from torch import Tensor

from services.compute.backends.names import Gate, GateCurve
from services.compute.backends.recurrent import ChannelDecays, DeltaDecays, HeadDecays
from services.compute.backends.states import StatePlan, in_turn
from services.compute.kernels.bfloat16 import Bfloat16Kernels


class KernelConvolution:
    """The convolution by our kernel."""

    def __init__(self, kernels: Bfloat16Kernels, weight: Tensor, bias: Tensor | None) -> None:
        """`weight`: [n_channels, kernel]; `bias`: [n_channels]. Both float32."""
        self._kernels, self._taps, self._bias = kernels, weight.t().contiguous(), bias

    def gated(self, bcx: Tensor, state: Tensor, plan: StatePlan) -> Tensor:
        """Return c * conv(b * x)."""
        return self._convolve(bcx, state, plan, gated=True)

    def activated(self, x: Tensor, state: Tensor, plan: StatePlan) -> Tensor:
        """Return silu(conv(x))."""
        return self._convolve(x, state, plan, gated=False)

    def _convolve(self, x: Tensor, state: Tensor, plan: StatePlan, *, gated: bool) -> Tensor:
        out = torch.empty(plan.n_rows, self._taps.shape[1], dtype=torch.bfloat16)

        def advance(rows: Tensor, first: int, end: int) -> None:
            self._kernels.convolve_(state, rows, x[first:end], self._taps, self._bias, out[first:end], gated=gated)

        in_turn(advance, state, plan)
        return out


class KernelStateSpace:
    """The scan by our kernel."""

    def __init__(self, kernels: Bfloat16Kernels, decays: HeadDecays) -> None:
        self._kernels, self._of = kernels, decays
        self._numbers = tuple(numbers.contiguous() for numbers in (decays.rate, decays.step_bias, decays.skip))

    def __call__(self, x: Tensor, b: Tensor, c: Tensor, dt: Tensor, state: Tensor, plan: StatePlan) -> Tensor:
        """Return the heads' results."""
        of = self._of
        out = torch.empty(plan.n_rows, len(of.rate) * of.head_dim, dtype=torch.bfloat16)

        def advance(rows: Tensor, first: int, end: int) -> None:
            tokens = x[first:end], b[first:end], c[first:end], dt[first:end]
            self._kernels.state_space_(state, rows, tokens, self._numbers, of.least_step, of.n_groups, out[first:end])

        in_turn(advance, state, plan)
        return out


class KernelChannelSpace:
    """The scan of channels by our kernel."""

    def __init__(self, kernels: Bfloat16Kernels, decays: ChannelDecays) -> None:
        numbers = decays.rates, decays.step_bias, decays.skip
        self._kernels, self._numbers = kernels, tuple(each.contiguous() for each in numbers)

    def __call__(self, x: Tensor, b: Tensor, c: Tensor, dt: Tensor, state: Tensor, plan: StatePlan) -> Tensor:
        """Return the channels' results."""
        out = torch.empty(plan.n_rows, x.shape[1], dtype=torch.bfloat16)

        def advance(rows: Tensor, first: int, end: int) -> None:
            tokens = x[first:end], b[first:end], c[first:end], dt[first:end]
            self._kernels.channel_space_(state, rows, tokens, self._numbers, out[first:end])

        in_turn(advance, state, plan)
        return out


class KernelDeltaRule:
    """The scan of heads that have a decay each by our kernel."""

    def __init__(self, kernels: Bfloat16Kernels, decays: DeltaDecays) -> None:
        self._kernels, self._of = kernels, decays
        self._numbers = decays.rate.contiguous(), decays.step_bias.contiguous()

    def __call__(self, mixed: Tensor, dt: Tensor, rate: Tensor, state: Tensor, plan: StatePlan) -> Tensor:
        """Return the heads' results."""
        of = self._of
        out = torch.empty(plan.n_rows, len(of.rate) * of.value_dim, dtype=torch.bfloat16)

        def advance(rows: Tensor, first: int, end: int) -> None:
            tokens = mixed[first:end], dt[first:end], rate[first:end]
            self._kernels.delta_rule_(state, rows, tokens, self._numbers, of.n_key_heads, out[first:end])

        in_turn(advance, state, plan)
        return out


class KernelGatedNorm:
    """The gate and the norm by our kernel."""

    def __init__(
        self,
        kernels: Bfloat16Kernels,
        weight: Tensor | None,
        n_groups: int,
        eps: float,
        gate: Gate,
        curve: GateCurve,
    ) -> None:
        """`weight`: [size] float32; None: there is no norm."""
        self._kernels, self._weight, self._n_groups, self._eps = kernels, weight, n_groups, eps
        self._outside, self._sigmoid = gate == "outside", curve == "sigmoid"

    def __call__(self, y: Tensor, z: Tensor) -> Tensor:
        """Return the gated rows [n, size]."""
        out = torch.empty(y.shape, dtype=torch.bfloat16)
        of = self._weight, self._n_groups, self._eps
        self._kernels.gated_norm(y, z, *of, out, outside=self._outside, sigmoid=self._sigmoid)
        return out
