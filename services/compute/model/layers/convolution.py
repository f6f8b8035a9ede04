"""Layers that are a causal convolution over a sequence's last tokens, between two gates."""

from __future__ import annotations

import torch
from torch import Tensor

from services.compute.backends.base import Step
from services.compute.backends.recurrent import Convolution
from services.compute.model.layers.adapters import AdaptedLinear
from services.compute.model.layers.embedding import pad_rows
from services.compute.model.layers.linear import LinearLoader
from services.compute.model.mixers import ShortConv
from services.compute.model.shard import Shard, Span
from services.compute.model.spec import ModelSpec


class ShortConvLayer:
    """out(c * conv(b * x)), with b, c and x products of the row. The result is this rank's summand."""

    def __init__(self, index: int, bcx: AdaptedLinear, conv: Convolution, out: AdaptedLinear) -> None:
        self._index, self._bcx, self._conv, self._out = index, bcx, conv, out

    def project(self, x: Tensor, step: Step) -> Tensor:
        """Advance the state by the step's rows; return what `attend` projects, [n_rows, channels]."""
        assert step.states is not None
        assert step.cache.states is not None
        n_rows, plan = len(x), step.states
        (state,) = step.cache.states.layers[self._index]
        bcx = self._bcx(x, step.adapters)[: plan.n_rows]
        return pad_rows(self._conv.gated(bcx, state, plan), n_rows)

    def attend(self, mixed: Tensor, step: Step) -> Tensor:
        """Return [n_rows, hidden_size], to be summed over the ranks."""
        return self._out(mixed, step.adapters)


def load_conv(load: LinearLoader, shards: list[Shard]) -> Convolution:
    """Load the filters of channels `shards`, concatenated."""
    device = load.backend.device
    weight = load.weight(shards, dense=True).dense(torch.float32, device)
    bias = load.bias(shards)
    return load.backend.ops.convolution(weight, None if bias is None else bias.float())


def load_short_conv(spec: ModelSpec, mixer: ShortConv, load: LinearLoader, index: int) -> ShortConvLayer:
    """Load layer `index`'s convolution; ranks divide the channels."""
    key, hidden, size = f"layers.{index}.", spec.hidden_size, mixer.size
    bcx = load.column_parallel([f"{key}conv_{part}" for part in "bcx"], size, hidden)
    conv = load_conv(load, [Shard(f"{key}filter", (size, mixer.kernel), load.share(size), Span(0, mixer.kernel))])
    return ShortConvLayer(index, bcx, conv, load.row_parallel(f"{key}conv_out", hidden, size))
