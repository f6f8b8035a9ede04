"""The small operations of a layer by our Triton kernels, and the choice between them and torch's."""

from __future__ import annotations

import logging
import math
import subprocess
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from services.compute.backends import keys
from services.compute.backends.base import (
    Elementwise,
    Expert,
    Experts,
    Linear,
    LogitShard,
    LowRank,
    Norm,
    Ops,
    RmsNorm,
    Rope,
)
from services.compute.backends.batch import AdapterRows
from services.compute.backends.cuda.codes import CodesLinear, PackedWeight, converts_float8, stays_codes
from services.compute.backends.cuda.grouped import GroupedExperts
from services.compute.backends.cuda.kv_codes import CodeWriter
from services.compute.backends.cuda.low_rank import TritonLowRank
from services.compute.backends.cuda.ops import CudaOps
from services.compute.backends.cuda.small import TritonLogitShard, TritonRmsNorm, TritonRotation, power_of_two
from services.compute.backends.cuda.states import TritonStates, states_error
from services.compute.backends.draws import Chances
from services.compute.backends.kv_cache import KvLayer, Rotation
from services.compute.backends.kv_format import find_kv_format, plain_format
from services.compute.backends.kv_formats import NAMES
from services.compute.backends.names import Activation
from services.compute.backends.recurrent import Convolution
from services.compute.backends.shapes import ExpertRouting, ExpertsShape, KvShape
from services.compute.backends.states import ScanTokens, StatePlan
from services.compute.backends.torch.experts import ExpertStack, Router
from services.compute.backends.torch.ops import TorchOps
from services.compute.backends.weights import Dense, Rounded, Stacked, Weight

logger = logging.getLogger(__name__)

_LARGEST_ROW = 16384  # numbers that a program keeps in registers
_GATED = 1024  # numbers of a gate's program
_GATES = ("silu", "gelu", "gelu_tanh")
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}


class TritonOps(CudaOps):
    """Our kernels: for each small operation a launch, for products with codes, those of experts and states one each.

    Everything else is `CudaOps`.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        """Raises ImportError without Triton."""
        # Imported here, because CPUs do not have it.
        from services.compute.backends.cuda.kernels import codes, grouped, kv_codes, layer, low_rank, pages, states

        super().__init__(dtype, device)
        self._kernels: Any = layer
        self._products: Any = codes  # None: weights are dense
        self._grouped: Any = grouped  # None: experts by `CudaOps`
        self._low_rank: Any = low_rank  # None: adapters by `CudaOps`
        self._coder: CodeWriter | None = CodeWriter(kv_codes)  # None: a cache of codes is written by torch
        self._pages: Any = pages  # None: blocks are summarised by torch
        self._state_kernels: Any = states
        self._float8 = converts_float8(device)

    def disagreement(self) -> str | None:
        """Return how the kernels differ from torch's on a few rows, or why they do not run; None if neither."""
        rows = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)).to(self._device, self._dtype)
        exact = _computed(TorchOps(torch.float32, self._device), rows.float())
        try:
            error = (_computed(self, rows) - exact).abs().max().item()
            if error <= _TOLERANCE[self._dtype]:
                self._check_products(rows)
                self._check_experts(rows)
                self._check_adapters(rows)
                self._check_codes(rows)
                self._check_summaries(rows)
        except self._failures as reason:
            return f"Triton: {reason}"
        return None if error <= _TOLERANCE[self._dtype] else f"they differ from the reference by {error:.2g}"

    @property
    def _failures(self) -> tuple[type[Exception], ...]:
        """The errors of kernels that do not run; an AssertionError: Triton does not find the driver's library."""
        return self._kernels.TritonError, subprocess.CalledProcessError, OSError, AssertionError

    @cached_property
    def _states(self) -> TritonStates | None:
        """Our kernels of states, checked at their first use, since most models have no states; None: torch's serve."""
        ours, problem = TritonStates(self._state_kernels, exact=self._dtype is torch.float32), ""
        try:
            error = states_error(ours, TorchOps(self._dtype, self._device), self._dtype, self._device)
            if not error <= _TOLERANCE[self._dtype]:
                problem = f"results differ from the reference by {error:.2g}"
        except self._failures as reason:
            problem = f"Triton: {reason}"
        if problem:
            logger.warning("states are advanced by torch, one sequence after another: %s", problem)
        return None if problem else ours

    def _check_products(self, rows: Tensor) -> None:
        """Keep weights dense if a product with codes differs from that of the dense weight."""
        values = torch.randn(32, rows.shape[1], generator=torch.Generator().manual_seed(1)) / 8
        weight = Stacked((Rounded(values, 0, rows.shape[1], 4, 32),))
        exact = rows.float() @ weight.dense(torch.float32, self._device).T
        error = (self.linear(weight, None).in_float32(rows) - exact).abs().max().item()
        if not error <= _TOLERANCE[self._dtype]:
            logger.warning("weights are kept dense: a product with codes differs from the reference by %.2g", error)
            self._products = None

    def _check_experts(self, rows: Tensor) -> None:
        """Leave experts to `CudaOps` if the grouped product differs from the reference."""
        generator, size = torch.Generator().manual_seed(2), rows.shape[1]

        def mixture() -> Iterator[Expert]:
            generator.manual_seed(2)
            for _ in range(3):
                gate_up, down = (torch.randn(n, size, generator=generator) / 8 for n in (2 * size, size))
                yield Expert(Stacked((Dense(gate_up),)), Stacked((Dense(down),)))

        shape = ExpertsShape(range(3), size, size, ExpertRouting(2, normalise=True))
        exact = TorchOps(torch.float32, self._device).experts(mixture(), shape, "silu")(rows.float(), rows[:, :3])
        error = (self.experts(mixture(), shape, "silu")(rows, rows[:, :3]) - exact).abs().max().item()
        if not error <= _TOLERANCE[self._dtype]:
            logger.warning("experts are computed by torch: grouped products differ from the reference by %.2g", error)
            self._grouped = None

    def _check_adapters(self, rows: Tensor) -> None:
        """Leave adapters to `CudaOps` if the products of their factors differ from the reference."""
        generator, size = torch.Generator().manual_seed(3), rows.shape[1]
        a, b = (torch.randn(shape, generator=generator) / 8 for shape in ((3, size), (32, 3)))
        slots = torch.tensor([1, -1, 0, 1, -1], device=self._device)
        ours = torch.zeros(5, 32, dtype=self._dtype, device=self._device)
        layer = self.low_rank(32, size, 2, 5)
        layer.put(1, a, b)
        layer.add_(ours, rows, AdapterRows(slots, ()))
        exact = (rows.float() @ a.T.to(self._device) @ b.T.to(self._device)) * (slots == 1).unsqueeze(1)
        error = (ours - exact).abs().max().item()
        if not error <= _TOLERANCE[self._dtype]:
            logger.warning("adapters are computed by torch: products differ from the reference by %.2g", error)
            self._low_rank = None

    def _check_codes(self, rows: Tensor) -> None:
        """Write caches of codes by torch if ours are others."""
        shape, places = KvShape(16, 1, 16), torch.arange(len(rows), device=self._device)
        angles = torch.arange(40, dtype=torch.float32, device=self._device).view(5, 8)
        for kv_format in map(find_kv_format, NAMES):
            if kv_format.coding is None:
                continue
            ours, reference = (kv_format.allocate(1, shape, self._device) for _ in range(2))
            qkv = rows.clone()
            rotation = self.rope(angles.cos(), angles.sin())(places)
            self.store(KvLayer(kv_format, shape, ours), places, qkv, rotation)
            kv_format.write(reference, shape, places, qkv[:, -shape.width :])  # the keys as they were coded
            if not torch.equal(ours, reference):
                name = kv_format.name
                logger.warning("keys and values are coded by torch: codes in %s differ from the reference's", name)
                self._coder = None
                return

    def _check_summaries(self, rows: Tensor) -> None:
        """Summarise blocks by torch if ours are others."""
        shape, places = KvShape(4, 1, 16), torch.arange(4, 8, device=self._device)
        for kv_format in (plain_format(self._dtype), *(form for form in map(find_kv_format, NAMES) if form.coding)):
            data = kv_format.allocate(2, shape, self._device)
            kv_format.write(data, shape, places, rows[:4, : shape.width])
            ours, reference = (rows.new_zeros(2, 1, 2, 16) for _ in range(2))
            self.summarise(KvLayer(kv_format, shape, data), places, ours)
            super().summarise(KvLayer(kv_format, shape, data), places, reference)
            if not torch.allclose(ours, reference, rtol=0.01, atol=0.0):
                logger.warning(
                    "blocks are summarised by torch: those in %s differ from the reference's", kv_format.name
                )
                self._pages = None
                return

    def form(self, weight: Weight, *, dense: bool = False) -> str:
        """Return in words how the device keeps `weight`."""
        return super().form(weight) if dense or not self._stays_codes(weight) else weight.form

    def linear(self, weight: Stacked, bias: Tensor | None) -> Linear:
        """Return the product with `weight`, whose codes stay codes where the kernel reads them."""
        if all(self._stays_codes(part) for part in weight.parts):
            packed = PackedWeight.of(weight, self._device)
            if packed is not None:
                return CodesLinear(self._products, packed, bias)
        return super().linear(weight, bias)

    def _stays_codes(self, weight: Weight) -> bool:
        return self._products is not None and stays_codes(weight, float8=self._float8)

    def rms_norm(self, weight: Tensor, eps: float) -> RmsNorm:
        """Return the norm with `weight`."""
        if weight.shape[-1] > _LARGEST_ROW:
            return super().rms_norm(weight, eps)
        return TritonRmsNorm(self._kernels, weight, eps)

    def add_norm(self, x: Tensor, added: Tensor, scale: float, norm: Norm) -> tuple[Tensor, Tensor]:
        """Return x + scale * added, and its norm."""
        if isinstance(norm, TritonRmsNorm) and norm.adds and x.is_contiguous():
            return x, norm.add(x, added, scale)
        return super().add_norm(x, added, scale, norm)

    def rope(self, cos: Tensor, sin: Tensor) -> Rope:
        """Return the rope with these angles, which the kernel looks up itself."""
        cos, sin = cos.contiguous(), sin.contiguous()
        return lambda positions: TritonRotation(self._kernels, cos, sin, positions)

    def store(self, layer: KvLayer, slots: Tensor, qkv: Tensor, rotation: Rotation | None = None) -> None:
        """Rotate queries in place, and write rotated keys, and values, in one launch."""
        kv_format, shape = layer.kv_format, layer.shape
        if kv_format.coding is not None and self._coder is not None and isinstance(rotation, TritonRotation | None):
            self._coder.store(kv_format.coding, layer.data, shape, slots, qkv, rotation)
        elif kv_format.numbers is qkv.dtype and isinstance(rotation, TritonRotation):
            rotation.store(layer.data.view(-1, shape.width), slots, qkv.view(len(qkv), -1, shape.head_dim))
        else:
            super().store(layer, slots, qkv, rotation)

    def summarise(self, layer: KvLayer, slots: Tensor, summaries: Tensor) -> None:
        """Write the summaries of the blocks whose last position is in `slots`, in one launch."""
        coding, shape = layer.kv_format.coding, layer.shape
        if self._pages is None or not len(slots):
            super().summarise(layer, slots, summaries)
            return
        part = shape.head_dim & -shape.head_dim  # the largest power of two that divides it
        self._pages.summarise[(len(slots), shape.n_kv_heads)](
            layer.data if coding is None else layer.data.view(coding.codes),
            layer.data if coding is None else layer.data.view(torch.bfloat16),
            slots,
            summaries,
            1 / math.sqrt(part),
            n_kv_heads=shape.n_kv_heads,
            head_dim=shape.head_dim,
            n_dims=power_of_two(shape.head_dim),
            n_levels=part.bit_length() - 1,
            block_tokens=shape.block_tokens,
            coded=coding is not None,
            num_warps=1,
            enable_fp_fusion=False,
        )

    def gate(self, name: Activation) -> Elementwise:
        """Return act(gate) * up."""
        if name not in _GATES:
            return super().gate(name)
        kernels = self._kernels

        def gated(gate_up: Tensor) -> Tensor:
            n, size = gate_up.shape[0], gate_up.shape[1] // 2
            out = gate_up.new_empty(n, size)
            if n:
                grid = (n, -(-size // _GATED))
                kernels.gate[grid](gate_up.contiguous(), out, size, n_columns=_GATED, name=name, num_warps=4)
            return out

        return gated

    @property
    def replays_states(self) -> bool:
        """Whether graphs can hold convolutions and scans."""
        return self._states is not None

    def convolution(self, weight: Tensor, bias: Tensor | None) -> Convolution:
        """Return the causal convolution with `weight` [n_channels, kernel]."""
        return super().convolution(weight, bias) if self._states is None else self._states.convolution(weight, bias)

    def scan(self, tokens: ScanTokens, state: Tensor, plan: StatePlan) -> Tensor:
        """Return the results of a step's tokens; `state` is advanced."""
        return super().scan(tokens, state, plan) if self._states is None else self._states.scan(tokens, state, plan)

    @property
    def replays_adapters(self) -> bool:
        """Whether graphs can hold the products of adapters."""
        return self._low_rank is not None

    def low_rank(self, n_out: int, n_in: int, slots: int, max_rank: int) -> LowRank:
        """Return empty factors of `slots` adapters for a layer [n_out, n_in]."""
        if self._low_rank is None:
            return super().low_rank(n_out, n_in, slots, max_rank)
        return TritonLowRank(self._low_rank, n_out, n_in, slots, max_rank, self._dtype, self._device)

    def experts(
        self, weights: Iterable[Expert], shape: ExpertsShape, activation: Activation, correction: Tensor | None = None
    ) -> Experts:
        """Return the experts with these `weights`, in one product for all."""
        if self._grouped is None:
            return super().experts(weights, shape, activation, correction)
        stack = ExpertStack.of(weights, shape, self._dtype, self._device)
        router, gate = Router(shape.routing, correction), self._between(activation, shape)
        return GroupedExperts(self._grouped, stack, shape, router, gate)

    def logit_shard(self, first_id: int, n_columns: int) -> LogitShard:
        """Return the shard of the columns from token `first_id` on."""
        return TritonLogitShard(self._kernels, first_id, n_columns, self._device)


def open_ops(dtype: torch.dtype, device: torch.device) -> CudaOps:
    """Return our kernels if Triton compiles them here and they agree with torch's; otherwise torch's, and warn."""
    try:
        fused = TritonOps(dtype, device)
        problem = fused.disagreement()
    except (ImportError, RuntimeError) as error:  # RuntimeError: no C compiler for Triton's launchers
        problem = str(error)
    else:
        if problem is None:
            logger.info("small operations: ours in Triton")
            return fused
    logger.warning("small operations are torch's, with a launch for each part: %s", problem)
    return CudaOps(dtype, device)


def _computed(ops: Ops, x: Tensor) -> Tensor:
    """Return the results of every operation of ours for rows `x` [n, 64], side by side in float32."""
    weight = torch.linspace(0.5, 1.5, x.shape[1], device=x.device)
    total, normed = ops.add_norm(x.clone(), x.flip(0).contiguous(), 0.5, ops.rms_norm(weight, 1e-5))
    angles = torch.arange(8 * len(x), dtype=torch.float32, device=x.device).view(len(x), 8)
    places = torch.arange(len(x), device=x.device)
    qkv, table = x.clone(), torch.zeros(len(x), 32, dtype=x.dtype, device=x.device)
    rotation = ops.rope(angles.cos(), angles.sin())(places)
    ops.store(KvLayer(plain_format(x.dtype), KvShape(1, 1, 16), table), places, qkv, rotation)
    drawn = ops.logit_shard(0, x.shape[1]).sample(x.float(), Chances(torch.ones_like(weight)[: len(x)], places, places))
    ids = keys.token_ids_of(drawn).unsqueeze(-1)
    parts = (total, normed, qkv[:, :32], table, ops.gate("silu")(x), ids)
    return torch.cat([part.float() for part in parts], dim=-1)
