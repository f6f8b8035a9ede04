"""A mixture of experts; the ranks divide whole experts among them."""

from __future__ import annotations

import torch

from services.worker.backends.base import Expert, Experts, Linear
from services.worker.backends.shapes import ExpertsShape
from services.worker.model.layers.linear import LinearLoader
from services.worker.model.shard import Shard
from services.worker.model.spec import ModelSpec, MoeSpec


class MoeMlp:
    """Sends each row to its most likely experts and sums their results. The result is this rank's summand."""

    def __init__(self, router: Linear, experts: Experts) -> None:
        self._router, self._experts = router, experts

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return [n, hidden_size], to be summed over the ranks."""
        return self._experts(x, self._router(x))


def load_moe(spec: ModelSpec, moe: MoeSpec, load: LinearLoader, prefix: str) -> MoeMlp:
    """Load the router and this rank's experts. Raises ModelError."""
    mine = load.share(moe.n_experts)
    shape = ExpertsShape(
        numbers=range(mine.start, mine.stop),
        hidden_size=spec.hidden_size,
        ffn_size=moe.ffn_size,
        n_active=moe.n_active,
        normalise=moe.normalise,
    )
    weights = (_weights(shape, load, f"{prefix}experts.{number}.") for number in shape.numbers)
    experts = load.backend.ops.experts(weights, shape, spec.activation)
    return MoeMlp(load.replicated(f"{prefix}router", moe.n_experts, spec.hidden_size), experts)


def _weights(shape: ExpertsShape, load: LinearLoader, key: str) -> Expert:
    hidden, ffn = shape.hidden_size, shape.ffn_size
    gate_up = [Shard.whole(key + part, (ffn, hidden)) for part in ("gate", "up")]
    return Expert(load.weight(gate_up), load.weight([Shard.whole(f"{key}down", (hidden, ffn))]))
