"""Lightning attention: linear attention whose heads forget by a constant factor each."""

from __future__ import annotations

import torch
from torch import Tensor

from services.compute.backends.base import Norm, Ops, Step
from services.compute.backends.curves import sigmoid, silu
from services.compute.backends.states import ScanTokens
from services.compute.model.layers.adapters import AdaptedLinear
from services.compute.model.layers.embedding import pad_rows
from services.compute.model.layers.linear import LinearLoader
from services.compute.model.layers.norm import load_divided_norm
from services.compute.model.mixers import Lightning
from services.compute.model.shard import Shard, Span
from services.compute.model.spec import ModelSpec

_EPS = 1e-6  # epsilon of the results' norm, independent of the config's


class LightningLayer:
    """out(norm(scan(silu(q, k, v))) * sigmoid(gate)). The result is this rank's summand."""

    def __init__(
        self, index: int, project: AdaptedLinear, decay: Tensor, head_dim: int, norm: Norm, out: AdaptedLinear, ops: Ops
    ) -> None:
        """`decay`: the factors of this rank's heads, [n_heads] float32. `norm`: of all heads together."""
        self._index, self._project, self._decay, self._head_dim = index, project, decay, head_dim
        self._norm, self._out, self._ops = norm, out, ops

    def project(self, x: Tensor, step: Step) -> Tensor:
        """Advance the state by the step's rows; return what `attend` projects, [n_rows, n_heads * head_dim]."""
        assert step.states is not None
        assert step.cache.states is not None
        n_rows, plan, n_heads = len(x), step.states, len(self._decay)
        size = n_heads * self._head_dim
        mixed, gate = torch.split(self._project(x, step.adapters)[: plan.n_rows].float(), [3 * size, size], dim=-1)
        q, k, v = silu(mixed).to(x.dtype).float().view(plan.n_rows, 3, n_heads, self._head_dim).unbind(1)
        (heads,) = step.cache.states.layers[self._index]
        y = self._ops.scan(ScanTokens(v, k, q, self._decay.expand(plan.n_rows, -1)), heads, plan).flatten(1)
        gated = self._norm(y.to(x.dtype)).float() * sigmoid(gate)
        return pad_rows(gated.to(x.dtype), n_rows)

    def attend(self, mixed: Tensor, step: Step) -> Tensor:
        """Return [n_rows, hidden_size], to be summed over the ranks."""
        return self._out(mixed, step.adapters)


def load_lightning(spec: ModelSpec, mixer: Lightning, load: LinearLoader, index: int) -> LightningLayer:
    """Load layer `index`'s lightning attention; ranks divide the heads."""
    key, shape, cols = f"layers.{index}.lightning_", (mixer.size, spec.hidden_size), Span(0, spec.hidden_size)
    project = load.build([Shard(key + part, shape, load.share(mixer.size), cols) for part in ("q", "k", "v", "gate")])
    heads = load.share(mixer.n_heads)
    decay = torch.tensor(mixer.decays[heads.start : heads.stop], device=load.backend.device)
    norm = load_divided_norm(load, f"{key}norm", mixer.size, _EPS)
    out = load.row_parallel(f"{key}out", spec.hidden_size, mixer.size)
    return LightningLayer(index, project, decay, mixer.head_dim, norm, out, load.backend.ops)
