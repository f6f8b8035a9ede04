"""Mamba: state-space layers whose channels have a decay for each number of their states."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from services.compute.backends.base import Norm, Step
from services.compute.backends.recurrent import ChannelDecays, Convolution, GatedNorm, StateSpace
from services.compute.model.layers.adapters import AdaptedLinear
from services.compute.model.layers.convolution import load_conv
from services.compute.model.layers.embedding import pad_rows
from services.compute.model.layers.linear import LinearLoader
from services.compute.model.mixers import Mamba
from services.compute.model.shard import Shard, Span
from services.compute.model.spec import ModelSpec


class MambaLayer:
    """out(scan(conv(x)) * silu(z)), with b, c and steps of time that are products of conv(x)."""

    def __init__(
        self,
        index: int,
        mixer: Mamba,
        project: AdaptedLinear,
        conv: Convolution,
        select: AdaptedLinear,
        steps: AdaptedLinear,
        norms: tuple[Norm, Norm, Norm],
        scan: StateSpace,
        gate: GatedNorm,
        out: AdaptedLinear,
    ) -> None:
        """`norms`: of the steps' numbers, b and c. `gate` has no norm."""
        self._index, self._mixer, self._project, self._conv, self._select = index, mixer, project, conv, select
        self._steps, self._norms, self._scan, self._gate, self._out = steps, norms, scan, gate, out

    def project(self, x: Tensor, step: Step) -> Tensor:
        """Advance the state by the step's rows; return what `attend` projects, [n_rows, channels]."""
        assert step.states is not None
        assert step.cache.states is not None
        n_rows, plan, mixer = len(x), step.states, self._mixer
        inner, z = self._project(x, step.adapters)[: plan.n_rows].chunk(2, dim=-1)
        inputs, channels = step.cache.states.layers[self._index]
        mixed = self._conv.activated(inner, inputs, plan)
        chosen = step.reduce(self._select(pad_rows(mixed, n_rows), step.adapters))
        parts = torch.split(chosen, [mixer.step_rank, mixer.n_states, mixer.n_states], dim=-1)
        numbers, b, c = (norm(part.contiguous()) for norm, part in zip(self._norms, parts, strict=True))
        dt, b, c = (part[: plan.n_rows] for part in (self._steps(numbers, step.adapters), b, c))
        return pad_rows(self._gate(self._scan(mixed, b, c, dt, channels, plan), z), n_rows)

    def attend(self, mixed: Tensor, step: Step) -> Tensor:
        """Return [n_rows, hidden_size], to be summed over the ranks."""
        return self._out(mixed, step.adapters)


def load_mamba(spec: ModelSpec, mixer: Mamba, load: LinearLoader, index: int) -> MambaLayer:
    """Load layer `index`'s state-space layer; ranks divide the channels."""
    key, hidden, size, device = f"layers.{index}.", spec.hidden_size, mixer.size, load.backend.device
    rank, states, mine = mixer.step_rank, mixer.n_states, load.share(size)
    conv = load_conv(load, [Shard(f"{key}filter", (size, mixer.kernel), mine, Span(0, mixer.kernel))])
    rates = load.weight([Shard(f"{key}rates", (size, states), mine, Span(0, states))], dense=True)
    names = (f"{key}ssm_dt.bias", f"{key}ssm_skip")
    step_bias, skip = (load.source.vector(name, size, mine).float().to(device) for name in names)

    def norm(name: str, n: int) -> Callable[[Tensor], Tensor]:
        if mixer.norms == "none":
            return lambda x: x
        weighted = mixer.norms == "weighted"
        weight = load.source.vector(key + name, n).float() if weighted else torch.ones(n)
        return load.backend.ops.rms_norm(weight.to(device), mixer.norm_eps)

    return MambaLayer(
        index,
        mixer,
        load.column_parallel([f"{key}ssm_x", f"{key}ssm_z"], size, hidden),
        conv,
        load.row_parallel(f"{key}ssm_select", rank + 2 * states, size),
        load.build([Shard(f"{key}ssm_dt", (size, rank), mine, Span(0, rank))], bias=False),
        (norm("step_norm", rank), norm("b_norm", states), norm("c_norm", states)),
        load.backend.ops.state_space(ChannelDecays(-torch.exp(rates.dense(torch.float32, device)), step_bias, skip)),
        load.backend.ops.gated_norm(None, 1, spec.norm_eps, "plain"),
        load.row_parallel(f"{key}ssm_out", hidden, size),
    )
