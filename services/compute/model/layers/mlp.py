"""The dense MLP of a layer."""

from __future__ import annotations

import torch

from services.compute.backends.base import Elementwise, Norm
from services.compute.backends.batch import AdapterRows
from services.compute.model.layers.adapters import Product
from services.compute.model.layers.linear import LinearLoader
from services.compute.model.layers.norm import load_divided_norm
from services.compute.model.spec import ModelSpec

XIELU = ("alpha_p", "alpha_n", "beta")  # the stored numbers of a layer's xIELU


class Mlp:
    """down(norm(act(up(x)))), where `act` may be a gate over two halves of `up`. The result is this rank's summand."""

    def __init__(
        self,
        up: Product,
        act: Elementwise,
        norm: Norm | None,
        down: Product,
        factors: tuple[float, float] = (1.0, 1.0),
    ) -> None:
        """`factors`: of the gate before its activation, and of the results."""
        self._up, self._act, self._norm, self._down = up, act, norm, down
        self._gate_factor, self._down_factor = factors

    def __call__(self, x: torch.Tensor, adapters: AdapterRows | None = None) -> torch.Tensor:
        """Return [n, hidden_size], to be summed over the ranks."""
        outer = self._up(x, adapters)
        if self._gate_factor != 1.0:
            outer[:, : outer.shape[1] // 2] *= self._gate_factor
        inner = self._act(outer)
        y = self._down(inner if self._norm is None else self._norm(inner), adapters)
        return y if self._down_factor == 1.0 else y * self._down_factor


def load_mlp(spec: ModelSpec, load: LinearLoader, prefix: str, ffn_size: int) -> Mlp:
    """Load the dense MLP with the keys' prefix `prefix`. Raises ModelError."""
    gated = spec.mlp == "gated"
    keys = [f"{prefix}gate", f"{prefix}up"] if gated else [f"{prefix}up"]
    up = load.column_parallel(keys, ffn_size, spec.hidden_size)
    norm = load_divided_norm(load, f"{prefix}down_norm", ffn_size, spec.norm_eps) if spec.sub_norm else None
    down = load.row_parallel(f"{prefix}down", spec.hidden_size, ffn_size)
    return Mlp(up, _activation(spec, load, prefix), norm, down, (spec.gate_factor, spec.down_factor))


def _activation(spec: ModelSpec, load: LinearLoader, prefix: str) -> Elementwise:
    ops = load.backend.ops
    if spec.activation == "xielu":
        return ops.xielu(*(load.source.number(f"{prefix}{name}") for name in XIELU))
    return ops.gate(spec.activation) if spec.mlp == "gated" else ops.activation(spec.activation)
