"""The computations of a layer by plain torch: the reference, on any device."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from services.worker.backends.base import Columns, Elementwise, Linear, Norm, RmsNorm, Rope
from services.worker.backends.kv_cache import KvCache
from services.worker.backends.names import Activation
from services.worker.backends.torch.columns import TorchColumns

_ACTIVATIONS: dict[Activation, Elementwise] = {
    "silu": F.silu,
    "gelu": lambda x: F.gelu(x.contiguous()),  # other kernels serve strided input, which one row never is
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}


class TorchLinear:
    """A weight as it is stored."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        """Return x W^T + bias: [n, n_in] -> [n, n_out]."""
        return F.linear(x, self._weight, self._bias)

    def in_float32(self, x: Tensor) -> Tensor:
        """Return the same in float32, after it was rounded to the dtype of the weight."""
        return self(x).float()


class TorchRmsNorm:
    """Every row on its own."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        """`weight`: [size] or [..., size], broadcast against x."""
        size = weight.shape[-1]
        # |x| / sqrt(size) is the root mean square, so hypot(|x|, sqrt(size * eps)) is the divisor times sqrt(size).
        self._weight = weight.float() * math.sqrt(size)
        self._floor = torch.tensor(math.sqrt(size * eps), device=weight.device)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the normalised `x`."""
        exact = x.float()
        length = torch.linalg.vector_norm(exact, dim=-1, keepdim=True)
        return (exact / torch.hypot(length, self._floor)).mul_(self._weight).to(x.dtype)

    def write(self, x: Tensor, out: Tensor) -> None:
        """Write the normalised `x` to `out`, which may be `x`."""
        out.copy_(self(x))


class TorchLayerNorm:
    """Layer normalisation with an optional bias."""

    def __init__(self, weight: Tensor, bias: Tensor | None, eps: float) -> None:
        self._weight, self._bias, self._eps = weight, bias, eps

    def __call__(self, x: Tensor) -> Tensor:
        """Return the normalised `x`."""
        return F.layer_norm(x, self._weight.shape, self._weight, self._bias, self._eps)


class TorchRope:
    """Looks the angles up once per step."""

    def __init__(self, cos: Tensor, sin: Tensor) -> None:
        self._cos, self._sin = cos, sin  # [max_positions, rotary_dim / 2]

    def at(self, positions: Tensor) -> TorchRotation:
        """Return the rotation of rows at `positions` [n]."""
        cos = self._cos.index_select(0, positions).unsqueeze(1)  # [n, 1, rotary_dim / 2]
        sin = self._sin.index_select(0, positions).unsqueeze(1)
        # The first half of a head is rotated against the second: out = x cos + swap(x) [-sin, sin].
        return TorchRotation(torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1))


class TorchRotation:
    """The rotation of some rows."""

    def __init__(self, cos: Tensor, sin: Tensor) -> None:
        self._cos, self._sin = cos, sin  # [n, 1, rotary_dim]

    def rotate_(self, heads: Tensor) -> None:
        """Rotate the first rotary_dim elements of `heads` [n, n_heads, head_dim] in place."""
        size = self._cos.shape[-1]
        x = heads[..., :size]
        x.copy_(torch.addcmul(x * self._cos, x.roll(size // 2, -1), self._sin))


class TorchOps:
    """Nothing but torch."""

    min_rows = 1

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """Return the product with `weight` [n_out, n_in]."""
        return TorchLinear(weight, bias)

    def rms_norm(self, weight: Tensor, eps: float) -> RmsNorm:
        """Return the norm with `weight`."""
        return TorchRmsNorm(weight, eps)

    def layer_norm(self, weight: Tensor, bias: Tensor | None, eps: float) -> Norm:
        """Return layer normalisation with `weight` [size]."""
        return TorchLayerNorm(weight, bias, eps)

    def rope(self, cos: Tensor, sin: Tensor) -> Rope:
        """Return the rope with these angles."""
        return TorchRope(cos, sin)

    def write_kv(self, cache: KvCache, layer: int, slots: Tensor, rows: Tensor) -> None:
        """Write `rows` to `slots` [n] of a layer."""
        cache.rows[layer].index_copy_(0, slots, rows)

    def activation(self, name: Activation) -> Elementwise:
        """Return the function of an activation."""
        return _ACTIVATIONS[name]

    def gate(self, name: Activation) -> Elementwise:
        """Return act(gate) * up."""
        activation = self.activation(name)

        def gated(gate_up: Tensor) -> Tensor:
            gate, up = gate_up.chunk(2, dim=-1)  # [n, size] each
            return activation(gate).mul_(up)

        return gated

    def add(self, x: Tensor, added: Tensor, scale: float) -> Tensor:
        """Return x + scale * added."""
        return torch.add(x, added, alpha=scale)

    def columns(self, first_id: int, n_columns: int) -> Columns:
        """Return what samples of the columns from token `first_id` on."""
        return TorchColumns(first_id, n_columns, self._device)
