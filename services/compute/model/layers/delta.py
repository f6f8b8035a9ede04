"""Gated delta rule: linear attention that corrects what its state remembers of a key."""

from __future__ import annotations

import torch
from torch import Tensor

from services.compute.backends.base import Step
from services.compute.backends.batch import AdapterRows
from services.compute.backends.names import GateCurve
from services.compute.backends.recurrent import Convolution, DeltaDecays, DeltaRule, GatedNorm
from services.compute.model.layers.adapters import AdaptedLinear
from services.compute.model.layers.convolution import load_conv
from services.compute.model.layers.embedding import pad_rows
from services.compute.model.layers.linear import LinearLoader
from services.compute.model.mixers import DeltaNet
from services.compute.model.shard import Shard, Span
from services.compute.model.spec import ModelSpec


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
        rule: DeltaRule,
        norm: GatedNorm,
        out: AdaptedLinear,
    ) -> None:
        """`gates`: None if `project` has z and the steps. `norm`: of each head."""
        self._index, self._mixer, self._ranks = index, mixer, ranks
        self._project, self._gates, self._conv, self._rule = project, gates, conv, rule
        self._norm, self._out = norm, out

    def project(self, x: Tensor, step: Step) -> Tensor:
        """Advance the state by the step's rows; return what `attend` projects, [n_rows, heads * value_dim]."""
        assert step.states is not None
        assert step.cache.states is not None
        n_rows, plan, mixer = len(x), step.states, self._mixer
        keys, values, n_heads = (n // self._ranks for n in (mixer.keys, mixer.values, mixer.n_value_heads))
        products, channels = self._project(x, step.adapters)[: plan.n_rows], 2 * keys + values
        if self._gates is None:
            z, rest = products[:, channels : channels + values], products[:, channels + values :]
            rate, dt = rest[:, :n_heads], rest[:, n_heads:]
        else:
            rate = products[:, channels:]
            z, dt = (part[: plan.n_rows] for part in self._gates(x, step.adapters))
        inputs, heads = step.cache.states.layers[self._index]
        mixed = self._conv.activated(products[:, :channels], inputs, plan)
        return pad_rows(self._norm(self._rule(mixed, dt, rate, heads, plan), z), n_rows)

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

    weight, ops = load.source.vector(f"{key}delta_norm", mixer.value_dim).float().to(device), load.backend.ops
    curve: GateCurve = "sigmoid" if mixer.rank else "silu"
    norm = ops.gated_norm(weight.repeat(len(heads)), len(heads), spec.norm_eps, "outside", curve)
    if mixer.rank:
        biases = load.source.vector(f"{key}delta_step", mixer.keys, load.share(mixer.keys)).float().to(device)
        biases = biases.view(-1, mixer.key_dim)
    else:
        biases = of_heads("delta_step")
    sizes_of_heads = mixer.n_key_heads // load.comm.size, mixer.key_dim, mixer.value_dim
    rule = ops.delta_rule(DeltaDecays(-torch.exp(of_heads("delta_a")), biases, *sizes_of_heads))
    out = load.row_parallel(f"{key}delta_out", hidden, mixer.values)
    return DeltaLayer(index, mixer, load.comm.size, project, gates, conv, rule, norm, out)


def _load_gates(mixer: DeltaNet, load: LinearLoader, key: str, hidden: int) -> LowRankGates:
    shape = (mixer.rank, hidden)
    few = load.build([Shard.whole(f"{key}delta_{part}_few", shape) for part in ("z", "dt")])
    gate = load.column_parallel([f"{key}delta_z"], mixer.values, mixer.rank)
    return LowRankGates(few, gate, load.column_parallel([f"{key}delta_dt"], mixer.keys, mixer.rank))
