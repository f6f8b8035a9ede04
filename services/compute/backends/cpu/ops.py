"""The computations of a layer on a CPU: with torch and oneDNN, and with our kernels.

A row's bits depend neither on the other rows nor on the number of threads.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor

from services.compute.backends.base import (
    Elementwise,
    Expert,
    Experts,
    Linear,
    LogitShard,
    Lookup,
    LowRank,
    PerHead,
    RmsNorm,
    Rope,
)
from services.compute.backends.cpu.attention import INT8
from services.compute.backends.cpu.codes import holds_integers
from services.compute.backends.cpu.linear import KernelLinear, PackedLinear
from services.compute.backends.cpu.logit_shard import KernelLogitShard
from services.compute.backends.cpu.low_rank import KernelLowRank
from services.compute.backends.cpu.quantized import QuantizedLinear, stays_integer
from services.compute.backends.cpu.recurrent import (
    KernelChannelSpace,
    KernelConvolution,
    KernelDeltaRule,
    KernelGatedNorm,
    KernelStateSpace,
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
from services.compute.backends.states import ScanTokens, StatePlan, in_turn
from services.compute.backends.torch.experts import ExpertLoop, Router
from services.compute.backends.torch.ops import TorchOps
from services.compute.backends.weights import Dense, Stacked, Weight
from services.compute.kernels.bfloat16 import MAX_HEAD_DIM, Bfloat16Kernels

_PARALLEL_FROM = 16384  # elements; torch computes fewer in one thread (gelu; for others the limit is 32768)


class OneDnnOps(TorchOps):
    """Products by oneDNN where it supports the dtype, everything else by torch."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(dtype, torch.device("cpu"))
        there = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        halves = dtype is torch.bfloat16 and there and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        self._packs = there and (dtype is torch.float32 or halves)
        self.min_rows = PackedLinear.min_rows if self._packs else 1

    def linear(self, weight: Stacked, bias: Tensor | None) -> Linear:
        """Return the product with `weight`."""
        return PackedLinear(weight, bias, self._dtype) if self._packs else super().linear(weight, bias)

    def tied(self, weight: Stacked, bias: Tensor | None) -> tuple[Lookup, Linear]:
        """Return the lookup of rows of `weight` and the product with it.

        They are two tensors where oneDNN packs, because its layout is opaque.
        """
        if not self._packs:
            return super().tied(weight, bias)
        table = weight.dense(self._dtype, self._device)
        return partial(table.index_select, 0), self.linear(Stacked((Dense(table),)), bias)

    def per_head(self, weights: Tensor) -> PerHead:
        """Return the product of each head with its own matrix of `weights`, whose rows do not depend on others."""
        products = [self.linear(Stacked((Dense(weight.contiguous()),)), None) for weight in weights]
        return lambda x: torch.stack([product(x[:, head].contiguous()) for head, product in enumerate(products)], dim=1)

    def activation(self, name: Activation) -> Elementwise:
        """Return the function of an activation."""
        function = super().activation(name)
        return RowAligned(function) if self._dtype is torch.float32 else function

    def experts(
        self, weights: Iterable[Expert], shape: ExpertsShape, activation: Activation, correction: Tensor | None = None
    ) -> Experts:
        """Return the experts with these `weights`: the host is the device, so it may ask which are chosen."""
        gate = self._between(activation, shape)
        router = Router(shape.routing, correction)
        return ExpertLoop([self._expert(expert, gate) for expert in weights], shape, router)

    def _expert(self, expert: Expert, gate: Elementwise) -> Elementwise:
        gate_up, down = self.linear(expert.gate_up, expert.gate_up_bias), self.linear(expert.down, expert.down_bias)
        return lambda x: down(gate(gate_up(x)))


class RowAligned:
    """Computes a float32 activation in blocks of rows too small for torch to divide among threads.

    For the last elements of a share that is no multiple of 32, silu and gelu use scalar code that rounds differently
    (measured with torch 2.13), so a row's bits would depend on the number of rows.
    """

    def __init__(self, function: Elementwise) -> None:
        self._function = function

    def __call__(self, x: Tensor) -> Tensor:
        """Compute [n, size]."""
        if torch.get_num_threads() == 1 or x.numel() < _PARALLEL_FROM:
            return self._function(x)
        n_rows = max(1, (_PARALLEL_FROM - 1) // x.shape[1])
        return torch.cat([self._function(block) for block in torch.split(x, n_rows)])


class KernelRmsNorm:
    """The norm by our kernel."""

    def __init__(self, kernels: Bfloat16Kernels, weight: Tensor, eps: float) -> None:
        self._weight, self._eps, self._kernels = weight.float().contiguous(), eps, kernels

    def __call__(self, x: Tensor) -> Tensor:
        """Return the normalised `x`."""
        out = torch.empty(x.shape, dtype=x.dtype)
        self.write(x, out)
        return out

    def write(self, x: Tensor, out: Tensor) -> None:
        """Write the normalised `x` to `out`, which may be `x`."""
        self._kernels.rms_norm(x, self._weight, self._eps, out)


class KernelOps(OneDnnOps):
    """Our kernels in bfloat16; torch for what they do not compute."""

    def __init__(self, kernels: Bfloat16Kernels) -> None:
        super().__init__(torch.bfloat16)
        self._kernels = kernels
        self.min_rows = 1

    def form(self, weight: Weight, *, dense: bool = False) -> str:
        """Return in words how `linear` keeps `weight`."""
        return weight.form if holds_integers(weight) else super().form(weight)

    def scan(self, tokens: ScanTokens, state: Tensor, plan: StatePlan) -> Tensor:
        """Return the results of a step's tokens; `state` is advanced."""
        if tokens.rates is not None:
            return super().scan(tokens, state, plan)
        dense, out = tokens.contiguous(), torch.empty(tokens.inputs.shape)

        def advance(rows: Tensor, first: int, end: int) -> None:
            part = dense.part(first, end)
            self._kernels.scan_(state, rows, (part.inputs, part.b, part.c, part.decay), part.rate, out[first:end])

        in_turn(advance, state, plan)
        return out

    def convolution(self, weight: Tensor, bias: Tensor | None) -> Convolution:
        """Return the convolution by our kernel."""
        return KernelConvolution(self._kernels, weight, bias)

    def state_space(self, decays: HeadDecays | ChannelDecays) -> StateSpace:
        """Return the scan by our kernels."""
        if isinstance(decays, ChannelDecays):
            return KernelChannelSpace(self._kernels, decays)
        return KernelStateSpace(self._kernels, decays)

    def delta_rule(self, decays: DeltaDecays) -> DeltaRule:
        """Return the scan by our kernels."""
        return KernelDeltaRule(self._kernels, decays) if decays.step_bias.dim() == 1 else super().delta_rule(decays)

    def gated_norm(
        self, weight: Tensor | None, n_groups: int, eps: float, gate: Gate, curve: GateCurve = "silu"
    ) -> GatedNorm:
        """Return the gate and the norm by our kernel."""
        return KernelGatedNorm(self._kernels, weight, n_groups, eps, gate, curve)

    def linear(self, weight: Stacked, bias: Tensor | None) -> Linear:
        """Return the product with `weight`, whose integers stay integers."""
        kind = QuantizedLinear if stays_integer(weight) else KernelLinear
        return kind(self._kernels, weight, bias)

    def low_rank(self, n_out: int, n_in: int, slots: int, max_rank: int) -> LowRank:
        """Return empty factors, which our kernel multiplies with."""
        return KernelLowRank(self._kernels, n_out, n_in, slots, max_rank)

    def embedding(self, weight: Stacked) -> Lookup:
        """Return the lookup of rows of `weight`, whose integers stay integers."""
        if stays_integer(weight):
            table = QuantizedLinear(self._kernels, weight, None)
            if table.looks_up:
                return table.rows
        return super().embedding(weight)

    def tied(self, weight: Stacked, bias: Tensor | None) -> tuple[Lookup, Linear]:
        """Return the product with the packed `weight`, and the lookup that unpacks rows of it."""
        if stays_integer(weight):
            product = QuantizedLinear(self._kernels, weight, bias)
            if product.looks_up:
                return product.rows, product
        dense = KernelLinear(self._kernels, weight, bias)
        return dense.rows, dense

    def rms_norm(self, weight: Tensor, eps: float) -> RmsNorm:
        """Return the norm with `weight`."""
        return KernelRmsNorm(self._kernels, weight, eps)

    def rope(self, cos: Tensor, sin: Tensor) -> Rope:
        """Return the rope with these angles, which our kernel looks up itself."""
        rotate_ = self._kernels.rotate_
        return lambda positions: lambda heads: rotate_(heads, cos, sin, positions)

    def store(self, layer: KvLayer, slots: Tensor, qkv: Tensor, rotation: Rotation | None = None) -> None:
        """Rotate queries and keys in place, and write bfloat16 and int8 by our kernels."""
        kv_format, shape, rows = layer.kv_format, layer.shape, rows_to_store(layer.shape, slots, qkv, rotation)
        if kv_format.numbers is torch.bfloat16:
            self._kernels.write_rows(layer.data.view(-1, shape.width), slots, rows)
        elif kv_format.coding == INT8 and shape.head_dim <= MAX_HEAD_DIM:
            self._kernels.write_codes(layer.data, slots, rows, 2 * shape.n_kv_heads, shape.head_dim, shape.block_tokens)
        else:
            kv_format.write(layer.data, shape, slots, rows)

    def summarise(self, layer: KvLayer, slots: Tensor, summaries: Tensor) -> None:
        """Write the summaries of the blocks whose last position is in `slots`, by our kernel for bfloat16 and int8."""
        kv_format, shape = layer.kv_format, layer.shape
        ours = kv_format.numbers is torch.bfloat16 or kv_format.coding == INT8
        if not ours or shape.head_dim > MAX_HEAD_DIM:
            super().summarise(layer, slots, summaries)
            return
        self._kernels.summarise(layer.data, summaries, slots, shape.n_kv_heads, shape.block_tokens)

    def gate(self, name: Activation) -> Elementwise:
        """Return act(gate) * up."""
        if name not in ("silu", "gelu_tanh"):
            return super().gate(name)
        kernels, tanh = self._kernels, name == "gelu_tanh"

        def gated(gate_up: Tensor) -> Tensor:
            out = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
            kernels.gate(gate_up, out, tanh=tanh)
            return out

        return gated

    def add(self, x: Tensor, added: Tensor, scale: float) -> Tensor:
        """Add scale * added to `x` in place; returns `x`."""
        self._kernels.add_(x, added, scale)
        return x

    def logit_shard(self, first_id: int, n_columns: int) -> LogitShard:
        """Return the shard of the columns from token `first_id` on."""
        return KernelLogitShard(first_id, self._kernels)
