"""Mamba 2: state-space layers whose heads decay by one number each."""

from __future__ import annotations

import torch
from torch import Tensor

from services.compute.backends.base import Norm, Ops, Step
from services.compute.backends.states import ScanTokens, StatePlan
from services.compute.model.layers.adapters import AdaptedLinear
from services.compute.model.layers.convolution import CausalConv, load_conv
from services.compute.model.layers.curves import silu, softplus
from services.compute.model.layers.embedding import pad_rows
from services.compute.model.layers.linear import LinearLoader
from services.compute.model.layers.norm import DividedNorm
from services.compute.model.mixers import Mamba2
from services.compute.model.shard import Shard, Span
from services.compute.model.spec import ModelSpec


class Decays:
    """What a token does to the heads' states: state = decay * state + step * x (outer) b; y = state c + skip * x."""

    def __init__(self, rate: Tensor, step_bias: Tensor, skip: Tensor, least_step: float, ops: Ops) -> None:
        """`rate`, `step_bias`, `skip`: [n_heads] float32."""
        self._rate, self._step_bias, self._skip, self._least_step = rate, step_bias, skip, least_step
        self._ops = ops

    def scan(self, x: Tensor, b: Tensor, c: Tensor, dt: Tensor, state: Tensor, plan: StatePlan) -> Tensor:
        """Return [n_rows, n_heads, head_dim] of a step, in float32; `state` [rows of the store, ...] is advanced.

        `x` [n_rows, n_heads, head_dim]; `b`, `c` [n_rows, n_heads, n_states]; `dt` [n_rows, n_heads]. All float32.
        """
        steps = softplus(dt + self._step_bias).clamp(min=self._least_step)
        tokens = ScanTokens(x * steps.unsqueeze(-1), b, c, torch.exp(steps * self._rate))
        return self._ops.scan(tokens, state, plan) + self._skip.unsqueeze(-1) * x


class Mamba2Layer:
    """out(norm(scan(conv(x, b, c), dt) * silu(z))). The result is this rank's summand."""

    def __init__(
        self,
        index: int,
        mixer: Mamba2,
        ranks: int,
        project: AdaptedLinear,
        conv: CausalConv,
        decays: Decays,
        norm: Norm | None,
        out: AdaptedLinear,
        factors: Tensor | None,
    ) -> None:
        """`norm`: of float32 rows. `factors`: of the products' outputs."""
        self._factors = factors
        self._index, self._mixer, self._ranks = index, mixer, ranks
        self._project, self._conv, self._decays, self._norm, self._out = project, conv, decays, norm, out

    def project(self, x: Tensor, step: Step) -> Tensor:
        """Advance the state by the step's rows; return what `attend` projects, [n_rows, heads * head_dim]."""
        assert step.states is not None
        assert step.cache.states is not None
        n_rows, plan, mixer = len(x), step.states, self._mixer
        size, channels, n_heads = mixer.size // self._ranks, mixer.channels(self._ranks), mixer.n_heads // self._ranks
        products = self._project(x, step.adapters)[: plan.n_rows]
        if self._factors is not None:
            products = products * self._factors
        z, mixed, dt = torch.split(products, [size, channels, n_heads], dim=-1)
        inputs, heads = step.cache.states.layers[self._index]
        mixed = silu(self._conv(mixed, inputs, plan)).to(x.dtype).float()
        values, b, c = torch.split(mixed, [size, (channels - size) // 2, (channels - size) // 2], dim=-1)
        group = n_heads // mixer.groups(self._ranks)
        b, c = (part.reshape(len(part), -1, mixer.n_states).repeat_interleave(group, dim=1) for part in (b, c))
        y = self._decays.scan(values.reshape(len(values), n_heads, -1), b, c, dt.float(), heads, plan).flatten(1)
        return pad_rows(self._gated(y.to(x.dtype).float(), silu(z.float())).to(x.dtype), n_rows)

    def _gated(self, y: Tensor, gate: Tensor) -> Tensor:
        if self._norm is None:
            return y * gate
        return self._norm(y * gate) if self._mixer.gate == "inside" else self._norm(y) * gate

    def attend(self, mixed: Tensor, step: Step) -> Tensor:
        """Return [n_rows, hidden_size], to be summed over the ranks."""
        return self._out(mixed, step.adapters)


class GroupNorm:
    """RMS norm of each of several groups of a row, which no other rank holds a part of."""

    def __init__(self, weight: Tensor, n_groups: int, eps: float) -> None:
        """`weight`: [size] float32."""
        self._weight, self._n_groups, self._eps = weight, n_groups, eps

    def __call__(self, x: Tensor) -> Tensor:
        """Return the normalised rows [n, size] float32."""
        groups = x.reshape(len(x), self._n_groups, -1)
        mean = groups.square().mean(-1, keepdim=True)
        return (groups * torch.rsqrt(mean + self._eps)).flatten(1) * self._weight


def load_mamba2(spec: ModelSpec, mixer: Mamba2, load: LinearLoader, index: int) -> Mamba2Layer:
    """Load layer `index`'s state-space layer; ranks divide the heads, and the groups unless there is one."""
    key, hidden, ranks, device = f"layers.{index}.", spec.hidden_size, load.comm.size, load.backend.device
    heads = load.share(mixer.n_heads)
    states = mixer.n_groups * mixer.n_states
    groups = Span(0, states) if mixer.n_groups == 1 else load.share(states)
    values = Span(heads.start * mixer.head_dim, heads.stop * mixer.head_dim)
    rows = {"z": (mixer.size, values), "x": (mixer.size, values), "b": (states, groups), "c": (states, groups)}
    products = [*rows.items(), ("dt", (mixer.n_heads, heads))]
    project = load.build(
        [Shard(f"{key}ssm_{part}", (n, hidden), span, Span(0, hidden)) for part, (n, span) in products]
    )
    taps = Span(0, mixer.kernel)
    shards = [Shard(f"{key}filter_{part}", (rows[part][0], mixer.kernel), rows[part][1], taps) for part in "xbc"]

    def of_heads(name: str) -> Tensor:
        return load.source.vector(key + name, mixer.n_heads, heads).float().to(device)

    decays = Decays(
        -torch.exp(of_heads("ssm_a")), of_heads("ssm_step"), of_heads("ssm_skip"), mixer.least_step, load.backend.ops
    )
    norm: Norm | None = None
    if mixer.gate != "plain":
        weight = load.source.vector(f"{key}ssm_norm", mixer.size, values).float().to(device)
        norm = GroupNorm(weight, mixer.groups(ranks), spec.norm_eps)
        if ranks > mixer.n_groups:
            norm = DividedNorm(weight, mixer.size, spec.norm_eps, load.comm)
    factors = None
    if mixer.factors:
        spans = [span for _, (_, span) in products]
        parts = [torch.full((len(span),), factor) for factor, span in zip(mixer.factors, spans, strict=True)]
        factors = torch.cat(parts).to(device, load.backend.dtype)
    out = load.row_parallel(f"{key}ssm_out", hidden, mixer.size)
    return Mamba2Layer(index, mixer, ranks, project, load_conv(load, shards), decays, norm, out, factors)
