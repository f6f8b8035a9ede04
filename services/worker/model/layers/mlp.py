"""The dense MLP of a layer."""

from __future__ import annotations

import torch

from services.worker.backends.base import Elementwise, Linear
from services.worker.model.layers.linear import LinearLoader
from services.worker.model.spec import ModelSpec


class Mlp:
    """down(act(up(x))), where `act` may be a gate over two halves of `up`. The result is this rank's summand."""

    def __init__(self, up: Linear, act: Elementwise, down: Linear) -> None:
        self._up, self._act, self._down = up, act, down

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return [n, hidden_size], to be summed over the ranks."""
        return self._down(self._act(self._up(x)))


def load_mlp(spec: ModelSpec, load: LinearLoader, prefix: str, ffn_size: int) -> Mlp:
    """Load the dense MLP with the keys' prefix `prefix`. Raises ModelError."""
    gated, ops = spec.mlp == "gated", load.backend.ops
    keys = [f"{prefix}gate", f"{prefix}up"] if gated else [f"{prefix}up"]
    up = load.column_parallel(keys, ffn_size, spec.hidden_size)
    act = ops.gate(spec.activation) if gated else ops.activation(spec.activation)
    return Mlp(up, act, load.row_parallel(f"{prefix}down", spec.hidden_size, ffn_size))
