"""Gated delta rule: linear attention that corrects what its state remembers of a key."""

from __future__ import annotations

import torch
from torch import Tensor

from services.compute.backends.base import Ops, RmsNorm, Step
from services.compute.backends.batch import AdapterRows
from services.compute.backends.curves import sigmoid, silu, softplus
from services.compute.backends.recurrent import Convolution
from services.compute.backends.states import ScanTokens
from services.compute.model.layers.adapters import AdaptedLinear
from services.compute.model.layers.convolution import load_conv
from services.compute.model.layers.embedding import pad_rows
from services.compute.model.layers.linear import LinearLoader
from services.compute.model.mixers import DeltaNet
from services.compute.model.shard import Shard, Span
from services.compute.model.spec import ModelSpec

_EPS = 1e-6  # epsilon of the lengths of queries and keys


def _scaled(x: Tensor, factor: float = 1.0) -> Tensor:
    """Return the vectors [..., size] with length `factor`."""
    return x * (torch.rsqrt(x.square().sum(-1, keepdim=True) + _EPS) * factor)


class LowRankGates:
    """The gate and the steps of the decays of this rank's heads, as products of few numbers of a row."""

    def __init__(self, few: AdaptedLinear, gate: AdaptedLinear, steps: AdaptedLinear) -> None:
        self._few, self._gate, self._steps = few, gate, steps

    def __call__(self, x: Tensor, adapters: AdapterRows | None) -> tuple[Tensor, Tensor]:
        """Return [n, heads * value_dim] and [n, heads * key_dim] of rows [n, hidden_size]."""
        of_gate, of_steps = (part.contiguous() for part in self._few(x, adapters).chunk(2, dim=-1))
        return self._gate(of_gate, adapters), self._steps(of_steps, adapters)


class DeltaLayer:
    """out(norm(delta(conv(q, k, v), decay, rate)) * gate(z)). The result is this rank's summand."""

    def __init__(
        self,
        index: int,
        mixer: DeltaNet,
        ranks: int,
        project: AdaptedLinear,
        gates: LowRankGates | None,
        conv: Convolution,
        decay: tuple[Tensor, Tensor],
        norm: RmsNorm,
        out: AdaptedLinear,
        ops: Ops,
    ) -> None:
        """`decay`: the rates and the biases of its steps, float32, of a token's shape. `norm`: of a head.

        `gates`: None if `project` has z and the steps.
        """
        self._index, self._mixer, self._ranks, self._ops = index, mixer, ranks, ops
        self._project, self._gates, self._conv, self._decay = project, gates, conv, decay
        self._norm, self._out = norm, out

    def project(self, x: Tensor, step: Step) -> Tensor:
        """Advance the state by the step's rows; return what `attend` projects, [n_rows, heads * value_dim]."""
        assert step.states is not None
        assert step.cache.states is not None
        n_rows, plan, mixer = len(x), step.states, self._mixer
        keys, values, n_heads = (n // self._ranks for n in (mixer.keys, mixer.values, mixer.n_value_heads))
        projected = self._project(x, step.adapters)[: plan.n_rows]
        if self._gates is None:
            mixed, z, rate, dt = torch.split(projected, [2 * keys + values, values, n_heads, n_heads], dim=-1)
        else:
            mixed, rate = torch.split(projected, [2 * keys + values, n_heads], dim=-1)
            z, dt = (part[: plan.n_rows] for part in self._gates(x, step.adapters))
        inputs, heads = step.cache.states.layers[self._index]
        mixed = self._conv.activated(mixed, inputs, plan).float()
        q, k, v = torch.split(mixed, [keys, keys, values], dim=-1)
        group = mixer.n_value_heads // mixer.n_key_heads
        q, k = (part.reshape(plan.n_rows, -1, mixer.key_dim).repeat_interleave(group, dim=1) for part in (q, k))
        rates, biases = self._decay
        decay = torch.exp(rates * softplus(dt.float().view(plan.n_rows, *biases.shape) + biases))
        q, k, v = _scaled(q, mixer.key_dim**-0.5), _scaled(k), v.reshape(plan.n_rows, n_heads, mixer.value_dim)
        tokens = ScanTokens(v, k, q, decay, sigmoid(rate.float()))
        y = self._ops.scan(tokens, heads, plan).to(x.dtype)
        gate = silu if self._gates is None else sigmoid
        gated = self._norm(y).float() * gate(z.float()).view(y.shape)
        return pad_rows(gated.to(x.dtype).flatten(1), n_rows)

    def attend(self, mixed: Tensor, step: Step) -> Tensor:
        """Return [n_rows, hidden_size], to be summed over the ranks."""
        return self._out(mixed, step.adapters)


def load_delta(spec: ModelSpec, mixer: DeltaNet, load: LinearLoader, index: int) -> DeltaLayer:
    """Load layer `index`'s gated delta rule; ranks divide the key heads, and the value heads with them."""
    key, hidden, device = f"layers.{index}.", spec.hidden_size, load.backend.device
    heads = load.share(mixer.n_value_heads)
    sizes = {"q": mixer.keys, "k": mixer.keys, "v": mixer.values, "z": mixer.values}
    sizes |= dict.fromkeys(("rate", "dt"), mixer.n_value_heads)
    gates = None
    if mixer.rank:
        del sizes["z"], sizes["dt"]
        gates = _load_gates(mixer, load, key, hidden)
    cols, taps, kernel = Span(0, hidden), Span(0, mixer.kernel), mixer.kernel
    project = load.build([Shard(f"{key}delta_{part}", (n, hidden), load.share(n), cols) for part, n in sizes.items()])
    filters = [(part, sizes[part]) for part in "qkv"]
    conv = load_conv(load, [Shard(f"{key}filter_{part}", (n, kernel), load.share(n), taps) for part, n in filters])

    def of_heads(name: str) -> Tensor:
        return load.source.vector(key + name, mixer.n_value_heads, heads).float().to(device)

    weight = load.source.vector(f"{key}delta_norm", mixer.value_dim).float().to(device)
    norm = load.backend.ops.rms_norm(weight.expand(len(heads), -1).contiguous(), spec.norm_eps)
    rates = -torch.exp(of_heads("delta_a"))
    if mixer.rank:
        biases = load.source.vector(f"{key}delta_step", mixer.keys, load.share(mixer.keys)).float().to(device)
        decay = rates.unsqueeze(-1), biases.view(-1, mixer.key_dim)
    else:
        decay = rates, of_heads("delta_step")
    out = load.row_parallel(f"{key}delta_out", hidden, mixer.values)
    return DeltaLayer(index, mixer, load.comm.size, project, gates, conv, decay, norm, out, load.backend.ops)


def _load_gates(mixer: DeltaNet, load: LinearLoader, key: str, hidden: int) -> LowRankGates:
    shape = (mixer.rank, hidden)
    few = load.build([Shard.whole(f"{key}delta_{part}_few", shape) for part in ("z", "dt")])
    gate = load.column_parallel([f"{key}delta_z"], mixer.values, mixer.rank)
    return LowRankGates(few, gate, load.column_parallel([f"{key}delta_dt"], mixer.keys, mixer.rank))
