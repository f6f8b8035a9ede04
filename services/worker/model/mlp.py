"""The dense MLP of a layer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch.nn import functional as F

from services.worker.kernels.bfloat16 import Bfloat16Kernels
from services.worker.model.spec import Activation, ModelError, ModelSpec
from services.worker.parallel.linear import LinearLoader, LinearMethod

Elementwise = Callable[[torch.Tensor], torch.Tensor]

_ACTIVATIONS: dict[Activation, Elementwise] = {
    "silu": F.silu,
    "gelu": lambda x: F.gelu(x.contiguous()),  # other kernels serve strided input, which one row never is
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}


_PARALLEL_FROM = 16384  # elements; torch computes fewer in one thread (gelu; 32768 for others)


def activation(name: Activation, dtype: torch.dtype, device: torch.device) -> Elementwise:
    """Return the function of an activation, for [n, ffn_local] of `dtype`."""
    function = _ACTIVATIONS[name]
    return _RowAligned(function) if dtype is torch.float32 and device.type == "cpu" else function


class _RowAligned:
    """Computes a float32 activation in blocks of rows too small for torch to divide among threads.

    Where a thread's share is no multiple of 32 elements, silu and gelu finish with scalar code that rounds otherwise
    (measured, torch 2.13), so a row's bits would depend on the number of rows.
    """

    def __init__(self, function: Elementwise) -> None:
        self._function = function

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if torch.get_num_threads() == 1 or x.numel() < _PARALLEL_FROM:
            return self._function(x)
        n_rows = max(1, (_PARALLEL_FROM - 1) // x.shape[1])
        return torch.cat([self._function(block) for block in torch.split(x, n_rows)])


class GatedMlp:
    """down(act(gate(x)) * up(x)), gate and up merged in one product. The result is this rank's summand."""

    def __init__(self, gate_up: LinearMethod, down: LinearMethod, act: Elementwise) -> None:
        self._gate_up, self._down, self._act = gate_up, down, act

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return [n, hidden_size], to be summed over the ranks."""
        gate, up = self._gate_up.apply(x).chunk(2, dim=-1)  # [n, ffn_local] each
        return self._down.apply(self._act(gate).mul_(up))


class KernelGatedMlp:
    """The same, the gate by our kernel."""

    def __init__(self, gate_up: LinearMethod, down: LinearMethod, kernels: Bfloat16Kernels, *, tanh: bool) -> None:
        """`tanh`: gelu_tanh instead of silu."""
        self._gate_up, self._down, self._kernels, self._tanh = gate_up, down, kernels, tanh

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return [n, hidden_size], to be summed over the ranks."""
        gate_up = self._gate_up.apply(x)  # [n, 2 * ffn_local]
        gated = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
        self._kernels.gate(gate_up, gated, tanh=self._tanh)
        return self._down.apply(gated)


Mlp = Callable[[torch.Tensor], torch.Tensor]


def make_gated_mlp(name: Activation, gate_up: LinearMethod, down: LinearMethod, load: LinearLoader) -> Mlp:
    """Return the gated MLP that is fastest here."""
    if load.kernels is not None and name in ("silu", "gelu_tanh"):
        return KernelGatedMlp(gate_up, down, load.kernels, tanh=name == "gelu_tanh")
    return GatedMlp(gate_up, down, activation(name, load.dtype, load.device))


class PlainMlp:
    """down(act(up(x))). The result is this rank's summand."""

    def __init__(self, up: LinearMethod, down: LinearMethod, act: Elementwise) -> None:
        self._up, self._down, self._act = up, down, act

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return [n, hidden_size], to be summed over the ranks."""
        return self._down.apply(self._act(self._up.apply(x)))


def load_mlp(spec: ModelSpec, load: LinearLoader, prefix: str) -> Mlp:
    """Load the dense MLP whose tensors' keys begin with `prefix`. Raises ModelError."""
    if spec.ffn_size % load.comm.size:
        raise ModelError(f"config.json: {spec.ffn_size} MLP columns cannot be divided among {load.comm.size} ranks")
    down = load.row_parallel(f"{prefix}down", spec.hidden_size, spec.ffn_size)
    if spec.mlp == "plain":
        up = load.column_parallel([f"{prefix}up"], spec.ffn_size, spec.hidden_size)
        return PlainMlp(up, down, activation(spec.activation, load.dtype, load.device))
    keys = [f"{prefix}gate", f"{prefix}up"]
    gate_up = load.column_parallel(keys, spec.ffn_size, spec.hidden_size)
    return make_gated_mlp(spec.activation, gate_up, down, load)
