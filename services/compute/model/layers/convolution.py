"""Causal convolutions over a sequence's last tokens, and the layer that is nothing else."""

from __future__ import annotations

import torch
from torch import Tensor

from services.compute.backends.base import Step
from services.compute.backends.states import StatePlan, StateRows, copy_rows
from services.compute.model.layers.adapters import AdaptedLinear
from services.compute.model.layers.embedding import pad_rows
from services.compute.model.layers.linear import LinearLoader
from services.compute.model.mixers import ShortConv
from services.compute.model.shard import Shard, Span
from services.compute.model.spec import ModelSpec


class CausalConv:
    """A filter for each channel over its last inputs, the newest ones of which are the state.

    A row's sum has one order, oldest input first, so its bits do not depend on how the sequence is cut.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """`weight`: [n_channels, kernel]; `bias`: [n_channels]. Both float32."""
        self._taps = weight.t().contiguous()  # [kernel, n_channels]
        self._bias = bias

    def __call__(self, x: Tensor, state: Tensor, plan: StatePlan) -> Tensor:
        """Return float32 [n_rows, n_channels] of a step's inputs [n_rows, n_channels]; `state` is advanced.

        `state`: [rows of the store, kernel - 1, n_channels].
        """
        n = plan.n_single
        y = torch.empty(x.shape, dtype=torch.float32, device=x.device)
        if n:
            window = torch.cat((state[plan.singles], x[:n].unsqueeze(1)), dim=1)  # [n, kernel, n_channels]
            y[:n] = self._filtered([window[:, tap] for tap in range(len(self._taps))])
            state.index_copy_(0, plan.singles, window[:, 1:])
            copy_rows(state, plan.saves)
        for run in plan.runs:
            y[run.first : run.end] = self._run(x, state, run)
        return y

    def _run(self, x: Tensor, state: Tensor, run: StateRows) -> Tensor:
        n = run.end - run.first
        window = torch.cat((state[run.row], x[run.first : run.end]))  # [kernel - 1 + n, n_channels]
        state[run.row] = window[n:]
        if run.save >= 0:
            state[run.save] = state[run.row]
        return self._filtered([window[tap : tap + n] for tap in range(len(self._taps))])

    def _filtered(self, inputs: list[Tensor]) -> Tensor:
        """Return the weighted sum of `inputs`, [n, n_channels] each, oldest first."""
        total = inputs[0].float() * self._taps[0]
        for tap, values in zip(self._taps[1:], inputs[1:], strict=True):
            total += values.float() * tap
        return total if self._bias is None else total + self._bias


class ShortConvLayer:
    """out(c * conv(b * x)), with b, c and x products of the row. The result is this rank's summand."""

    def __init__(self, index: int, bcx: AdaptedLinear, conv: CausalConv, out: AdaptedLinear) -> None:
        self._index, self._bcx, self._conv, self._out = index, bcx, conv, out

    def project(self, x: Tensor, step: Step) -> Tensor:
        """Advance the state by the step's rows; return what `attend` projects, [n_rows, channels]."""
        assert step.states is not None
        assert step.cache.states is not None
        n_rows, plan = len(x), step.states
        b, c, values = self._bcx(x, step.adapters)[: plan.n_rows].chunk(3, dim=-1)
        (state,) = step.cache.states.layers[self._index]
        mixed = self._conv(b * values, state, plan).to(x.dtype)
        return pad_rows(c * mixed, n_rows)

    def attend(self, mixed: Tensor, step: Step) -> Tensor:
        """Return [n_rows, hidden_size], to be summed over the ranks."""
        return self._out(mixed, step.adapters)


def load_conv(load: LinearLoader, shards: list[Shard]) -> CausalConv:
    """Load the filters of channels `shards`, concatenated."""
    device = load.backend.device
    weight = load.weight(shards, dense=True).dense(torch.float32, device)
    bias = load.bias(shards)
    return CausalConv(weight, None if bias is None else bias.float())


def load_short_conv(spec: ModelSpec, mixer: ShortConv, load: LinearLoader, index: int) -> ShortConvLayer:
    """Load layer `index`'s convolution; ranks divide the channels."""
    key, hidden, size = f"layers.{index}.", spec.hidden_size, mixer.size
    bcx = load.column_parallel([f"{key}conv_{part}" for part in "bcx"], size, hidden)
    conv = load_conv(load, [Shard(f"{key}filter", (size, mixer.kernel), load.share(size), Span(0, mixer.kernel))])
    return ShortConvLayer(index, bcx, conv, load.row_parallel(f"{key}conv_out", hidden, size))
