"""Sees the inputs of a layer's linear layers while the layer computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from services.compute.backends.base import Elementwise, Experts, Linear
from services.compute.backends.names import Activation
from services.compute.backends.shapes import ExpertsShape
from services.compute.backends.torch.experts import ExpertLoop, Router
from services.compute.model.layers.linear import LinearLoader
from services.compute.model.shard import Shard
from services.tools.quantizer.methods.base import Inputs


class ActivationRecorder:
    """Sums over the inputs of linear layers, by the keys of the layers that share them."""

    def __init__(self) -> None:
        self.n_rows = 0  # rows of the current step
        self._products: dict[tuple[str, ...], Tensor] = {}
        self._magnitudes: dict[tuple[str, ...], Tensor] = {}
        self._seen: dict[tuple[str, ...], int] = {}

    def begin(self, n_rows: int) -> None:
        """Say how many rows the next step has; rows beyond them are padding."""
        self.n_rows = n_rows

    def add(self, keys: tuple[str, ...], x: Tensor) -> None:
        """Add the inputs `x` [n, n_in] of a step."""
        rows = x[: self.n_rows].float()
        if keys not in self._products:
            n_in = rows.shape[1]
            self._products[keys] = rows.new_zeros(n_in, n_in)
            self._magnitudes[keys], self._seen[keys] = rows.new_zeros(n_in), 0
        self._products[keys].addmm_(rows.t(), rows)
        self._magnitudes[keys] += rows.abs().sum(dim=0)
        self._seen[keys] += len(rows)

    def take(self, keys: tuple[str, ...]) -> Inputs | None:
        """Return the sums of the layers with these keys, and forget them; None if they saw no row."""
        if keys not in self._seen:
            return None
        n_rows = self._seen.pop(keys)
        return Inputs(self._products.pop(keys), self._magnitudes.pop(keys) / n_rows, n_rows)


class RecordedLinear:
    """A product whose inputs are recorded."""

    def __init__(self, linear: Linear, keys: tuple[str, ...], recorder: ActivationRecorder) -> None:
        self._linear, self._keys, self._recorder = linear, keys, recorder

    def __call__(self, x: Tensor) -> Tensor:
        """Return the product with x [n, n_in]."""
        self._recorder.add(self._keys, x)
        return self._linear(x)

    def in_float32(self, x: Tensor) -> Tensor:
        """Return the product in float32."""
        self._recorder.add(self._keys, x)
        return self._linear.in_float32(x)


class RecordedExperts:
    """A mixture whose experts record the rows that are routed to them."""

    def __init__(self, experts: Experts, recorder: ActivationRecorder) -> None:
        self._experts, self._recorder = experts, recorder

    def __call__(self, x: Tensor, logits: Tensor) -> Tensor:
        """Return [n, hidden_size]; padding is routed to no expert."""
        n_rows, out = self._recorder.n_rows, torch.zeros_like(x)
        out[:n_rows] = self._experts(x[:n_rows], logits[:n_rows])
        return out


@dataclass(frozen=True, slots=True)
class RecordingLoader(LinearLoader):
    """Builds linear layers whose inputs are recorded."""

    recorder: ActivationRecorder
    routed: bool  # whether to record also what a mixture routes to its experts

    def linear(self, shards: Sequence[Shard], *, bias: bool) -> Linear:
        """Merge `shards` by rows."""
        linear = LinearLoader.linear(self, shards, bias=bias)
        return RecordedLinear(linear, tuple(shard.key for shard in shards), self.recorder)

    def experts(
        self, prefix: str, shape: ExpertsShape, activation: Activation, correction: Tensor | None = None
    ) -> Experts:
        """Return experts that compute one after the other, each on its own rows, on every device."""
        if not self.routed:
            return LinearLoader.experts(self, prefix, shape, activation, correction)
        gate = self.backend.ops.gate(activation)
        experts = [self._expert(f"{prefix}{number}.", shape, gate) for number in shape.numbers]
        return RecordedExperts(ExpertLoop(experts, shape, Router(shape.routing, correction)), self.recorder)

    def _expert(self, key: str, shape: ExpertsShape, gate: Elementwise) -> Elementwise:
        weights, linear = self.expert(key, shape), self.backend.ops.linear
        up = linear(weights.gate_up, weights.gate_up_bias)
        up = RecordedLinear(up, (f"{key}gate", f"{key}up"), self.recorder)
        down = RecordedLinear(linear(weights.down, weights.down_bias), (f"{key}down",), self.recorder)
        return lambda x: down(gate(up(x)))
