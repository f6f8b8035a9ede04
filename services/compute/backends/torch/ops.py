"""The computations of a layer in plain torch: the reference, on any device."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from services.compute.backends.base import (
    Elementwise,
    Expert,
    Experts,
    Linear,
    LogitShard,
    Lookup,
    LowRank,
    Norm,
    PerHead,
    RmsNorm,
    Rope,
)
from services.compute.backends.kv_cache import KvLayer, Rotation, rows_to_store
from services.compute.backends.names import Activation, Gate, GateCurve
from services.compute.backends.recurrent import (
    ChannelDecays,
    Convolution,
    DeltaDecays,
    DeltaRule,
    GatedNorm,
    HeadDecays,
    StateSpace,
)
from services.compute.backends.shapes import ExpertsShape
from services.compute.backends.states import ScanTokens, StatePlan
from services.compute.backends.torch.experts import ExpertStack, Router, TorchExperts, sigmoid
from services.compute.backends.torch.logit_shard import TorchLogitShard
from services.compute.backends.torch.low_rank import LinearPairs
from services.compute.backends.torch.pages import summarise
from services.compute.backends.torch.recurrent import (
    TorchChannelSpace,
    TorchConvolution,
    TorchDeltaRule,
    TorchGatedNorm,
    TorchStateSpace,
)
from services.compute.backends.torch.scans import scan
from services.compute.backends.weights import Dense, Stacked, Weight

_ACTIVATIONS: dict[Activation, Elementwise] = {
    "silu": F.silu,
    "gelu": lambda x: F.gelu(x.contiguous()),  # strided input would use another kernel, except for a single row
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}


_ALPHA, _LIMIT = 1.702, 7.0  # constants of gpt-oss


def clamped_silu(gate_up: Tensor) -> Tensor:
    """Return gate * sigmoid(1.702 * gate) * (up + 1), gate at most 7 and up from -7 to 7 (gpt-oss)."""
    gate, up = gate_up.float().clamp(max=_LIMIT).chunk(2, dim=-1)  # [n, size] each
    return (gate * sigmoid(gate * _ALPHA) * (up.clamp(min=-_LIMIT) + 1)).to(gate_up.dtype)


class TorchLinear:
    """A product with a weight [n_out, n_in], unpacked."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        """Return x W^T + bias: [n, n_in] -> [n, n_out]."""
        return F.linear(x, self._weight, self._bias)

    def in_float32(self, x: Tensor) -> Tensor:
        """Return the product, rounded to the dtype of the weight, in float32."""
        return self(x).float()


class TorchRmsNorm:
    """RMS norm; a row does not depend on other rows."""

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


class TorchOps:
    """Computations in torch only."""

    min_rows = 1

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self._device = dtype, device

    def form(self, weight: Weight, *, dense: bool = False) -> str:
        """Return in words how `linear` keeps `weight`: as numbers of the dtype."""
        dtype = str(self._dtype).removeprefix("torch.")
        return dtype if isinstance(weight, Dense) else f"{weight.form} as {dtype}"

    def linear(self, weight: Stacked, bias: Tensor | None) -> Linear:
        """Return the product with `weight`."""
        return self.dense_linear(weight.dense(self._dtype, self._device), bias)

    def dense_linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """Return the product with `weight` [n_out, n_in] of this dtype and device."""
        return TorchLinear(weight, bias)

    def per_head(self, weights: Tensor) -> PerHead:
        """Return the product of each head with its own matrix of `weights`."""
        transposed = weights.to(self._device, self._dtype).mT.contiguous()  # [n_heads, n_in, n_out]
        return lambda x: torch.bmm(x.transpose(0, 1), transposed).transpose(0, 1)

    def low_rank(self, n_out: int, n_in: int, slots: int, max_rank: int) -> LowRank:
        """Return empty factors, each of which becomes a linear layer of this device."""
        return LinearPairs(self.linear)

    def embedding(self, weight: Stacked) -> Lookup:
        """Return the lookup of rows of `weight`."""
        return partial(weight.dense(self._dtype, self._device).index_select, 0)

    def tied(self, weight: Stacked, bias: Tensor | None) -> tuple[Lookup, Linear]:
        """Return the lookup of rows of `weight` and the product with it, sharing one tensor."""
        table = weight.dense(self._dtype, self._device)
        return partial(table.index_select, 0), self.dense_linear(table, bias)

    def rms_norm(self, weight: Tensor, eps: float) -> RmsNorm:
        """Return the norm with `weight`."""
        return TorchRmsNorm(weight, eps)

    def layer_norm(self, weight: Tensor, bias: Tensor | None, eps: float) -> Norm:
        """Return layer normalisation with `weight` [size]."""
        return lambda x: F.layer_norm(x, weight.shape, weight, bias, eps)

    def rope(self, cos: Tensor, sin: Tensor) -> Rope:
        """Return the rope with these angles, which a step looks up once."""
        half = cos.shape[1]

        def at(positions: Tensor) -> Rotation:
            c = cos.index_select(0, positions).unsqueeze(1)  # [n, 1, rotary_dim / 2]
            s = sin.index_select(0, positions).unsqueeze(1)
            # The first half of a head is rotated against the second: out = x cos + swap(x) [-sin, sin].
            both, signed = torch.cat((c, c), dim=-1), torch.cat((-s, s), dim=-1)

            def rotate_(heads: Tensor) -> None:
                x = heads[..., : 2 * half]
                x.copy_(torch.addcmul(x * both, x.roll(half, -1), signed))

            return rotate_

        return at

    def store(self, layer: KvLayer, slots: Tensor, qkv: Tensor, rotation: Rotation | None = None) -> None:
        """Rotate queries and keys in place, and write as the format is defined."""
        layer.kv_format.write(layer.data, layer.shape, slots, rows_to_store(layer.shape, slots, qkv, rotation))

    def summarise(self, layer: KvLayer, slots: Tensor, summaries: Tensor) -> None:
        """Write the summaries of the blocks whose last position is in `slots`; the host waits for their number."""
        size = layer.shape.block_tokens
        blocks = slots[slots % size == size - 1] // size
        if len(blocks):
            summarise(layer.kv_format, layer.data, layer.shape, blocks, summaries)

    def activation(self, name: Activation) -> Elementwise:
        """Return the function of an activation."""
        return _ACTIVATIONS[name]

    def xielu(self, alpha_p: float, alpha_n: float, beta: float) -> Elementwise:
        """Return xIELU with these stored numbers, computed in float32."""
        positive, negative = math.log1p(math.exp(alpha_p)), beta + math.log1p(math.exp(alpha_n))

        def function(x: Tensor) -> Tensor:
            exact = x.float()
            share = sigmoid(exact.clamp(max=0.0))
            below = (
                share / (1 - share) - 1 - exact
            )  # exp(x) - 1 - x; no operation here rounds a row's last numbers in another way
            curve = torch.where(exact > 0, positive * exact * exact, negative * below)
            return (curve + beta * exact).to(x.dtype)

        return function

    def scan(self, tokens: ScanTokens, state: Tensor, plan: StatePlan) -> Tensor:
        """Return the results of a step's tokens; `state` is advanced."""
        return scan(tokens, state, plan)

    def convolution(self, weight: Tensor, bias: Tensor | None) -> Convolution:
        """Return the causal convolution with `weight` [n_channels, kernel]."""
        return TorchConvolution(weight, bias)

    def state_space(self, decays: HeadDecays | ChannelDecays) -> StateSpace:
        """Return the scan of a state-space layer."""
        if isinstance(decays, ChannelDecays):
            return TorchChannelSpace(decays, self.scan)
        return TorchStateSpace(decays, self.scan)

    def delta_rule(self, decays: DeltaDecays) -> DeltaRule:
        """Return the scan of a gated delta rule."""
        return TorchDeltaRule(decays, self.scan)

    def gated_norm(
        self, weight: Tensor | None, n_groups: int, eps: float, gate: Gate, curve: GateCurve = "silu"
    ) -> GatedNorm:
        """Return the gate and the norm of a layer's results."""
        return TorchGatedNorm(weight, n_groups, eps, gate, curve)

    def sigmoid(self, x: Tensor) -> Tensor:
        """Return 1 / (1 + exp(-x))."""
        return sigmoid(x)

    def gate(self, name: Activation) -> Elementwise:
        """Return act(gate) * up."""
        if name == "clamped_silu":
            return clamped_silu
        activation = self.activation(name)

        def gated(gate_up: Tensor) -> Tensor:
            gate, up = gate_up.chunk(2, dim=-1)  # [n, size] each
            return activation(gate).mul_(up)

        return gated

    def experts(
        self, weights: Iterable[Expert], shape: ExpertsShape, activation: Activation, correction: Tensor | None = None
    ) -> Experts:
        """Return the experts with these `weights`."""
        router = Router(shape.routing, correction)
        stack = ExpertStack.of(weights, shape, self._dtype, self._device)
        return TorchExperts(stack, shape, router, self._between(activation, shape))

    def _between(self, activation: Activation, shape: ExpertsShape) -> Elementwise:
        """Return the function between the products of experts."""
        return self.gate(activation) if shape.gated else self.activation(activation)

    def add(self, x: Tensor, added: Tensor, scale: float) -> Tensor:
        """Return x + scale * added."""
        return torch.add(x, added, alpha=scale)

    def add_norm(self, x: Tensor, added: Tensor, scale: float, norm: Norm) -> tuple[Tensor, Tensor]:
        """Return x + scale * added, and its `norm`."""
        total = self.add(x, added, scale)
        return total, norm(total)

    def logit_shard(self, first_id: int, n_columns: int) -> LogitShard:
        """Return the shard of the columns from token `first_id` on."""
        return TorchLogitShard(first_id, n_columns, self._device)
