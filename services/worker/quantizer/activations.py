"""Sees the inputs of a layer's linear layers while the layer computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from services.worker.backends.base import Linear
from services.worker.model.layers.linear import LinearLoader
from services.worker.model.shard import Shard
from services.worker.quantizer.methods.base import Inputs


class Recorder:
    """Sums over the inputs of linear layers, by the keys of the layers that share them."""

    def __init__(self) -> None:
        self._n_rows = 0  # of the step that is computed
        self._products: dict[tuple[str, ...], Tensor] = {}
        self._magnitudes: dict[tuple[str, ...], Tensor] = {}
        self._seen: dict[tuple[str, ...], int] = {}

    def begin(self, n_rows: int) -> None:
        """Say how many rows the next step has; rows beyond them are padding."""
        self._n_rows = n_rows

    def add(self, keys: tuple[str, ...], x: Tensor) -> None:
        """Add the inputs `x` [n, n_in] of a step."""
        rows = x[: self._n_rows].float()
        if keys not in self._products:
            n_in = rows.shape[1]
            self._products[keys] = rows.new_zeros(n_in, n_in)
            self._magnitudes[keys], self._seen[keys] = rows.new_zeros(n_in), 0
        self._products[keys].addmm_(rows.t(), rows)
        self._magnitudes[keys] += rows.abs().sum(dim=0)
        self._seen[keys] += len(rows)

    def take(self, keys: tuple[str, ...]) -> Inputs:
        """Return the sums of the layers with these keys, and forget them."""
        return Inputs(self._products.pop(keys), self._magnitudes.pop(keys) / self._seen.pop(keys))


class RecordedLinear:
    """A product whose inputs are recorded."""

    def __init__(self, linear: Linear, keys: tuple[str, ...], recorder: Recorder) -> None:
        self._linear, self._keys, self._recorder = linear, keys, recorder

    def __call__(self, x: Tensor) -> Tensor:
        """Return the product with x [n, n_in]."""
        self._recorder.add(self._keys, x)
        return self._linear(x)

    def in_float32(self, x: Tensor) -> Tensor:
        """Return the product in float32."""
        self._recorder.add(self._keys, x)
        return self._linear.in_float32(x)


@dataclass(frozen=True, slots=True)
class RecordingLoader(LinearLoader):
    """Builds linear layers whose inputs are recorded."""

    recorder: Recorder

    def linear(self, shards: Sequence[Shard], *, bias: bool) -> Linear:
        """Merge `shards` by rows."""
        linear = LinearLoader.linear(self, shards, bias=bias)
        return RecordedLinear(linear, tuple(shard.key for shard in shards), self.recorder)
