"""Layers with a state by their definitions, in torch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from services.compute.backends.curves import sigmoid, silu, softplus
from services.compute.backends.names import Gate, GateCurve
from services.compute.backends.recurrent import ChannelDecays, DeltaDecays, HeadDecays
from services.compute.backends.states import ScanTokens, StatePlan, in_turn

_EPS = 1e-6  # epsilon of the lengths of queries and keys


class TorchConvolution:
    """The convolution as a sum over the taps."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """`weight`: [n_channels, kernel]; `bias`: [n_channels]. Both float32."""
        self._taps, self._bias = weight.t().contiguous(), bias  # [kernel, n_channels]

    def gated(self, bcx: Tensor, state: Tensor, plan: StatePlan) -> Tensor:
        """Return c * conv(b * x)."""
        b, c, x = bcx.chunk(3, dim=-1)
        return c * self.filtered(b * x, state, plan).to(x.dtype)

    def activated(self, x: Tensor, state: Tensor, plan: StatePlan) -> Tensor:
        """Return silu(conv(x))."""
        return silu(self.filtered(x, state, plan)).to(x.dtype)

    def filtered(self, x: Tensor, state: Tensor, plan: StatePlan) -> Tensor:
        """Return conv(x) in float32."""
        y, before = torch.empty(x.shape, dtype=torch.float32, device=x.device), len(self._taps) - 1

        def advance(rows: Tensor, first: int, end: int) -> None:
            new = x[first:end].view(len(rows), -1, x.shape[1])
            window = torch.cat((state[rows], new), dim=1)  # [sequences, kernel - 1 + rows of each, n_channels]
            total = self._sum([window[:, tap : tap + new.shape[1]] for tap in range(before + 1)])
            y[first:end] = total.flatten(0, 1)
            state.index_copy_(0, rows, window[:, new.shape[1] :])

        in_turn(advance, state, plan)
        return y

    def _sum(self, inputs: list[Tensor]) -> Tensor:
        total = inputs[0].float() * self._taps[0]
        for tap, values in zip(self._taps[1:], inputs[1:], strict=True):
            total += values.float() * tap
        return total if self._bias is None else total + self._bias


class TorchStateSpace:
    """The heads' inputs and decays, for a scan."""

    def __init__(self, decays: HeadDecays, scan: Callable[[ScanTokens, Tensor, StatePlan], Tensor]) -> None:
        """`scan`: that of `Ops`."""
        self._of, self._scan = decays, scan

    def __call__(self, x: Tensor, b: Tensor, c: Tensor, dt: Tensor, state: Tensor, plan: StatePlan) -> Tensor:
        """Return the heads' results."""
        of, n, n_heads = self._of, len(x), len(self._of.rate)
        heads, group = x.float().reshape(n, n_heads, of.head_dim), n_heads // of.n_groups
        b, c = (part.float().reshape(n, -1, of.n_states).repeat_interleave(group, dim=1) for part in (b, c))
        steps = softplus(dt.float() + of.step_bias).clamp(min=of.least_step)
        tokens = ScanTokens(heads * steps.unsqueeze(-1), b, c, torch.exp(steps * of.rate))
        y = self._scan(tokens, state, plan) + of.skip.unsqueeze(-1) * heads
        return y.to(x.dtype).flatten(1)


class TorchChannelSpace:
    """The channels' inputs and decays, for a scan in which they are the rows of one head's state."""

    def __init__(self, decays: ChannelDecays, scan: Callable[[ScanTokens, Tensor, StatePlan], Tensor]) -> None:
        """`scan`: that of `Ops`."""
        self._of, self._rates, self._scan = decays, decays.rates.unsqueeze(0), scan

    def __call__(self, x: Tensor, b: Tensor, c: Tensor, dt: Tensor, state: Tensor, plan: StatePlan) -> Tensor:
        """Return the channels' results."""
        wide, steps = x.float(), softplus(dt.float() + self._of.step_bias)
        inputs, b, c, decay = (part.unsqueeze(1) for part in (wide * steps, b.float(), c.float(), steps))
        tokens = ScanTokens(inputs, b, c, decay, rates=self._rates)
        y = self._scan(tokens, state.unsqueeze(1), plan).squeeze(1) + self._of.skip * wide
        return y.to(x.dtype)


class TorchDeltaRule:
    """The heads' queries, keys, values and decays, for a scan."""

    def __init__(self, decays: DeltaDecays, scan: Callable[[ScanTokens, Tensor, StatePlan], Tensor]) -> None:
        """`scan`: that of `Ops`."""
        self._of, self._scan = decays, scan

    def __call__(self, mixed: Tensor, dt: Tensor, rate: Tensor, state: Tensor, plan: StatePlan) -> Tensor:
        """Return the heads' results."""
        of, n, n_heads = self._of, len(mixed), len(self._of.rate)
        keys = of.n_key_heads * of.key_dim
        q, k, v = torch.split(mixed.float(), [keys, keys, n_heads * of.value_dim], dim=-1)
        group = n_heads // of.n_key_heads
        q, k = (part.reshape(n, -1, of.key_dim).repeat_interleave(group, dim=1) for part in (q, k))
        rates = of.rate if of.step_bias.dim() == 1 else of.rate.unsqueeze(-1)
        decay = torch.exp(rates * softplus(dt.float().reshape(n, *of.step_bias.shape) + of.step_bias))
        q, k, v = _scaled(q, of.key_dim**-0.5), _scaled(k), v.reshape(n, n_heads, of.value_dim)
        y = self._scan(ScanTokens(v, k, q, decay, sigmoid(rate.float())), state, plan)
        return y.to(mixed.dtype).flatten(1)


def _scaled(x: Tensor, factor: float = 1.0) -> Tensor:
    """Return the vectors [..., size] with length `factor`."""
    return x * (torch.rsqrt(x.square().sum(-1, keepdim=True) + _EPS) * factor)


class TorchGatedNorm:
    """RMS norm of each of several groups of a row, and the gate."""

    def __init__(self, weight: Tensor | None, n_groups: int, eps: float, gate: Gate, curve: GateCurve) -> None:
        """`weight`: [size] float32; None: there is no norm."""
        self._weight, self._n_groups, self._eps, self._gate = weight, n_groups, eps, gate
        self._curve = silu if curve == "silu" else sigmoid

    def __call__(self, y: Tensor, z: Tensor) -> Tensor:
        """Return the gated rows [n, size]."""
        x, gate = y.float(), self._curve(z.float())
        gated = self._norm(x) * gate if self._gate == "outside" else self._norm(x * gate)
        return gated.to(y.dtype)

    def _norm(self, x: Tensor) -> Tensor:
        if self._weight is None:
            return x
        groups = x.reshape(len(x), self._n_groups, -1)
        mean = groups.square().mean(-1, keepdim=True)
        return (groups * torch.rsqrt(mean + self._eps)).flatten(1) * self._weight
