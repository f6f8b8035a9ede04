"""The experts of a mixture: all of them on all rows, or by the host the rows of each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from services.worker.backends.base import Elementwise, Expert
from services.worker.backends.shapes import ExpertsShape, Routing


class TorchExperts:
    """Every expert computes every row, whichever are chosen, so that the host waits for nothing and reads nothing."""

    def __init__(
        self,
        weights: Iterable[Expert],
        shape: ExpertsShape,
        router: Router,
        gate: Elementwise,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        n, hidden, ffn = len(shape.numbers), shape.hidden_size, shape.ffn_size
        self.gate_up = torch.empty(n, 2 * ffn, hidden, dtype=dtype, device=device)
        self.down = torch.empty(n, hidden, ffn, dtype=dtype, device=device)
        for index, expert in enumerate(weights):
            self.gate_up[index] = expert.gate_up.dense(dtype, device)
            self.down[index] = expert.down.dense(dtype, device)
        self._shape, self._route, self._gate = shape, router, gate

    def __call__(self, x: Tensor, logits: Tensor) -> Tensor:
        """Return this rank's summand of [n, hidden_size]."""
        weights, chosen = self._route(logits)
        places, absent = self.places(chosen)
        every = self.multiply(x.expand(len(self.down), *x.shape), self.gate_up, self.down)  # [n_own, n, hidden_size]
        terms = every[places, torch.arange(len(x), device=x.device).unsqueeze(-1)]  # [n, n_active, hidden_size]
        return weighted_sum(terms.masked_fill(absent, 0), weights)

    def places(self, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Return which of this rank's experts the `chosen` [n, n_active] are, and where they are another rank's.

        [n, n_active], in which another rank's is 0, and [n, n_active, 1].
        """
        places = chosen - self._shape.numbers.start
        absent = (places < 0) | (places >= len(self._shape.numbers))
        return places.masked_fill(absent, 0), absent.unsqueeze(-1)

    def multiply(self, x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        """Return down(gate(gate_up(x))) of x [n_experts, n, hidden_size] with the weights of as many experts."""
        hidden = torch.bmm(x, gate_up.mT)
        gated = self._gate(hidden.flatten(0, 1)).view(*hidden.shape[:2], -1)
        return torch.bmm(gated, down.mT)


class ExpertLoop:
    """Every expert computes the rows that chose it, one expert after the other: the host reads how many they are."""

    def __init__(self, experts: Sequence[Elementwise], shape: ExpertsShape, router: Router) -> None:
        """`experts`: [n, hidden_size] -> [n, hidden_size] each."""
        self._experts, self._shape, self._route = experts, shape, router

    def __call__(self, x: Tensor, logits: Tensor) -> Tensor:
        """Return this rank's summand of [n, hidden_size]."""
        weights, chosen = self._route(logits)
        n, n_active = chosen.shape
        by_expert = torch.argsort(chosen.view(-1), stable=True)  # of n * n_active places
        counts = torch.bincount(chosen.view(-1), minlength=logits.shape[1]).tolist()
        out = x.new_zeros(n * n_active, x.shape[1])
        first = self._shape.numbers.start
        start = sum(counts[:first])
        for expert, count in zip(self._experts, counts[first:], strict=False):
            if count:
                places = by_expert[start : start + count]
                out.index_copy_(0, places, expert(x.index_select(0, places // n_active)))
            start += count
        return weighted_sum(out.view(n, n_active, -1), weights)


class Router:
    """Chooses each row's experts."""

    def __init__(self, routing: Routing, correction: Tensor | None) -> None:
        """`correction`: [n_experts], added to the scores for the choice."""
        self._routing, self._correction = routing, None if correction is None else correction.float()

    def __call__(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights of each row's best experts and their numbers, both [n, n_active].

        `logits`: [n, n_experts], of all ranks' experts.
        """
        routing, exact = self._routing, logits.float()
        scores = sigmoid(exact) if routing.scores == "sigmoid" else exact.softmax(dim=-1)
        choice = scores if self._correction is None else scores + self._correction
        if routing.n_kept_groups < routing.n_groups:
            choice = choice.masked_fill(self._outside(choice), -torch.inf)
        chosen = torch.topk(choice, routing.n_active, dim=-1).indices
        weights = scores.gather(-1, chosen)
        if routing.normalise:
            weights = weights / _sum_in_order(weights)
        return weights * routing.scale if routing.scale != 1.0 else weights, chosen

    def _outside(self, choice: Tensor) -> Tensor:
        """Whether an expert's group is not among the best, [n, n_experts]."""
        routing = self._routing
        groups = choice.view(len(choice), routing.n_groups, -1)  # [n, n_groups, size]
        best = _sum_in_order(groups.topk(2 if routing.group_score == "top2" else 1, dim=-1).values).squeeze(-1)
        kept = torch.topk(best, routing.n_kept_groups, dim=-1).indices
        outside = torch.ones_like(best, dtype=torch.bool).scatter_(-1, kept, False)
        return outside.unsqueeze(-1).expand_as(groups).flatten(1)


def sigmoid(x: Tensor) -> Tensor:
    """Return 1 / (1 + exp(-x)), whose bits do not depend on the number's place among the others.

    Torch's kernel for CPUs computes the last numbers by other code, that of softmax does not.
    """
    return torch.stack((x, torch.zeros_like(x)), dim=-1).softmax(dim=-1, dtype=torch.float32)[..., 0].to(x.dtype)


def weighted_sum(terms: Tensor, weights: Tensor) -> Tensor:
    """Return [n, size] of terms [n, n_active, size] and their weights [n, n_active]."""
    weighted = terms * weights.to(terms.dtype).unsqueeze(-1)
    return _sum_in_order(weighted.transpose(1, 2)).squeeze(-1)


def _sum_in_order(x: Tensor) -> Tensor:
    """Sum the last, short dimension in order, which a reduction kernel does not guarantee: [..., 1]."""
    total = x[..., :1].clone()
    for index in range(1, x.shape[-1]):
        total += x[..., index : index + 1]
    return total
