"""A mixture of experts; the ranks divide whole experts among them."""

from __future__ import annotations

import torch

from services.worker.backends.base import Linear
from services.worker.model.layers.linear import LinearLoader
from services.worker.model.layers.mlp import Mlp
from services.worker.model.shard import Shard
from services.worker.model.spec import ModelError, ModelSpec, MoeSpec


class MoeMlp:
    """Sends each row to its most likely experts and sums their results. The result is this rank's summand."""

    def __init__(self, moe: MoeSpec, router: Linear, experts: list[Mlp], first: int) -> None:
        """`experts` are this rank's experts, with the numbers [first, first + len(experts))."""
        self._moe, self._router, self._experts, self._first = moe, router, experts, first

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return [n, hidden_size], to be summed over the ranks."""
        moe, n = self._moe, x.shape[0]
        scores = torch.softmax(self._router(x), dim=-1, dtype=torch.float32)  # [n, n_experts]
        weights, chosen = torch.topk(scores, moe.n_active, dim=-1)  # [n, n_active]
        if moe.normalise:
            weights = weights / _sum_in_order(weights)
        by_expert = torch.argsort(chosen.view(-1), stable=True)  # of n * n_active places
        counts = torch.bincount(chosen.view(-1), minlength=moe.n_experts).tolist()
        out = x.new_zeros(n * moe.n_active, x.shape[1])
        start = sum(counts[: self._first])
        for expert, count in zip(self._experts, counts[self._first :], strict=False):
            if count:
                places = by_expert[start : start + count]
                out.index_copy_(0, places, expert(x.index_select(0, places // moe.n_active)))
            start += count
        terms = out.view(n, moe.n_active, -1) * weights.to(x.dtype).unsqueeze(-1)
        return _sum_in_order(terms.transpose(1, 2)).squeeze(-1)


def _sum_in_order(x: torch.Tensor) -> torch.Tensor:
    """Sum the last, short dimension in order, which a reduction kernel does not guarantee: [..., 1]."""
    total = x[..., :1].clone()
    for index in range(1, x.shape[-1]):
        total += x[..., index : index + 1]
    return total


def load_moe(spec: ModelSpec, moe: MoeSpec, load: LinearLoader, prefix: str) -> MoeMlp:
    """Load the router and this rank's experts. Raises ModelError."""
    if moe.n_experts % load.comm.size:
        raise ModelError(f"config.json: {moe.n_experts} experts cannot be divided among {load.comm.size} ranks")
    mine = load.share(moe.n_experts)
    hidden, ffn = spec.hidden_size, moe.ffn_size
    gate, experts = load.backend.ops.gate(spec.activation), []
    for number in range(mine.start, mine.stop):
        key = f"{prefix}experts.{number}."
        gate_up = [Shard.whole(key + part, (ffn, hidden)) for part in ("gate", "up")]
        down = Shard.whole(f"{key}down", (hidden, ffn))
        experts.append(Mlp(load.build(gate_up), gate, load.build([down])))
    router = load.replicated(f"{prefix}router", moe.n_experts, hidden)
    return MoeMlp(moe, router, experts, mine.start)
