"""Mamba 2: state-space layers whose heads decay by one number each."""

from __future__ import annotations

import torch
from torch import Tensor

from services.compute.backends.base import Step
from services.compute.backends.curves import silu
from services.compute.backends.names import Gate
from services.compute.backends.recurrent import Convolution, GatedNorm, HeadDecays, StateSpace
from services.compute.model.layers.adapters import AdaptedLinear
from services.compute.model.layers.convolution import load_conv
from services.compute.model.layers.embedding import pad_rows
from services.compute.model.layers.linear import LinearLoader
from services.compute.model.layers.norm import DividedNorm
from services.compute.model.mixers import Mamba2
from services.compute.model.shard import Shard, Span
from services.compute.model.spec import ModelSpec


class Mamba2Layer:
    """out(norm(scan(conv(x, b, c), dt) * silu(z))). The result is this rank's summand."""

    def __init__(
        self,
        index: int,
        mixer: Mamba2,
        ranks: int,
        project: AdaptedLinear,
        conv: Convolution,
        scan: StateSpace,
        gate: GatedNorm,
        out: AdaptedLinear,
        factors: Tensor | None,
    ) -> None:
        """`factors`: of the products' outputs."""
        self._factors = factors
        self._index, self._mixer, self._ranks = index, mixer, ranks
        self._project, self._conv, self._scan, self._gate, self._out = project, conv, scan, gate, out

    def project(self, x: Tensor, step: Step) -> Tensor:
        """Advance the state by the step's rows; return what `attend` projects, [n_rows, heads * head_dim]."""
        assert step.states is not None
        assert step.cache.states is not None
        n_rows, plan, mixer = len(x), step.states, self._mixer
        size, states = mixer.size // self._ranks, mixer.groups(self._ranks) * mixer.n_states
        end = size + mixer.channels(self._ranks)
        products = self._project(x, step.adapters)[: plan.n_rows]
        if self._factors is not None:
            products = products * self._factors
        inputs, heads = step.cache.states.layers[self._index]
        mixed = self._conv.activated(products[:, size:end], inputs, plan)
        x, b, c = mixed[:, :size], mixed[:, size : size + states], mixed[:, size + states :]
        y = self._scan(x, b, c, products[:, end:], heads, plan)
        return pad_rows(self._gate(y, products[:, :size]), n_rows)

    def attend(self, mixed: Tensor, step: Step) -> Tensor:
        """Return [n_rows, hidden_size], to be summed over the ranks."""
        return self._out(mixed, step.adapters)


class DividedGate:
    """The gate, and the norm of groups that ranks divide."""

    def __init__(self, norm: DividedNorm, gate: Gate) -> None:
        self._norm, self._gate = norm, gate

    def __call__(self, y: Tensor, z: Tensor) -> Tensor:
        """Return the gated rows of this rank's share, [n_rows, share]."""
        x, gate = y.float(), silu(z.float())
        normed = self._norm(x * gate) if self._gate == "inside" else self._norm(x) * gate
        return normed.to(y.dtype)


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

    decays = HeadDecays(
        *(-torch.exp(of_heads("ssm_a")), of_heads("ssm_step"), of_heads("ssm_skip"), mixer.least_step),
        *(mixer.head_dim, mixer.groups(ranks), mixer.n_states),
    )
    factors = None
    if mixer.factors:
        spans = [span for _, (_, span) in products]
        parts = [torch.full((len(span),), factor) for factor, span in zip(mixer.factors, spans, strict=True)]
        factors = torch.cat(parts).to(device, load.backend.dtype)
    out = load.row_parallel(f"{key}ssm_out", hidden, mixer.size)
    scan, gate = load.backend.ops.state_space(decays), _load_gate(spec, mixer, load, key, values)
    return Mamba2Layer(index, mixer, ranks, project, load_conv(load, shards), scan, gate, out, factors)


def _load_gate(spec: ModelSpec, mixer: Mamba2, load: LinearLoader, key: str, values: Span) -> GatedNorm:
    """Load the norm of this rank's `values`; ranks sum what it needs of a group that they divide."""
    ops, ranks = load.backend.ops, load.comm.size
    if mixer.gate == "plain":
        return ops.gated_norm(None, 1, spec.norm_eps, mixer.gate)
    weight = load.source.vector(f"{key}ssm_norm", mixer.size, values).float().to(load.backend.device)
    if ranks > mixer.n_groups:
        return DividedGate(DividedNorm(weight, mixer.size, spec.norm_eps, load.comm), mixer.gate)
    return ops.gated_norm(weight, mixer.groups(ranks), spec.norm_eps, mixer.gate)
