"""A mixture of experts; the ranks divide whole experts among them."""

from __future__ import annotations

import torch

from services.compute.backends.base import Experts, Ops
from services.compute.backends.batch import AdapterRows
from services.compute.backends.shapes import ExpertsShape
from services.compute.model.layers.adapters import AdaptedLinear
from services.compute.model.layers.linear import LinearLoader
from services.compute.model.layers.mlp import Mlp, load_mlp
from services.compute.model.spec import ModelSpec, MoeSpec


class MoeMlp:
    """Sends each row to its best experts and sums their results. The result is this rank's summand."""

    def __init__(
        self, ops: Ops, router: AdaptedLinear, experts: Experts, shared: Mlp | None, shared_gate: AdaptedLinear | None
    ) -> None:
        """`shared` computes all rows; its results are multiplied by the sigmoid of `shared_gate`, if there is one."""
        self._ops, self._router, self._experts = ops, router, experts
        self._shared, self._shared_gate = shared, shared_gate

    def __call__(self, x: torch.Tensor, adapters: AdapterRows | None = None) -> torch.Tensor:
        """Return [n, hidden_size], to be summed over the ranks."""
        chosen = self._experts(x, self._router(x))
        if self._shared is None:
            return chosen
        shared = self._shared(x, adapters)
        return chosen + (shared if self._shared_gate is None else shared * self._ops.sigmoid(self._shared_gate(x)))


def load_moe(spec: ModelSpec, moe: MoeSpec, load: LinearLoader, prefix: str) -> MoeMlp:
    """Load the router, this rank's experts and its share of the shared expert. Raises ModelError."""
    mine = load.share(moe.n_experts)
    of_rank, gated = range(mine.start, mine.stop), spec.mlp == "gated"
    shape = ExpertsShape(of_rank, spec.hidden_size, moe.ffn_size, moe.routing, gated)
    correction = None
    if moe.routing.corrected:
        correction = load.source.vector(f"{prefix}router_correction", moe.n_experts).to(load.backend.device)
    experts = load.experts(f"{prefix}experts.", shape, spec.activation, correction)
    router = load.replicated(f"{prefix}router", moe.n_experts, spec.hidden_size)
    shared = load_mlp(spec, load, f"{prefix}shared.", moe.shared_size) if moe.shared_size else None
    gate = load.replicated(f"{prefix}shared_gate", 1, spec.hidden_size) if moe.shared_gate else None
    return MoeMlp(load.backend.ops, router, experts, shared, gate)
