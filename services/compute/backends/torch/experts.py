"""The experts of a mixture: all of them on all rows, or by the host the rows of each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from services.compute.backends.base import Elementwise, Expert
from services.compute.backends.shapes import ExpertRouting, ExpertsShape


@dataclass(frozen=True, slots=True)
class ExpertStack:
    """The weights of several experts."""

    gate_up: Tensor  # [n_experts, 2 * ffn_size, hidden_size]; [n_experts, ffn_size, hidden_size] of `up` without a gate
    down: Tensor  # [n_experts, hidden_size, ffn_size]
    gate_up_bias: Tensor | None  # [n_experts, 1, 2 * ffn_size]
    down_bias: Tensor | None  # [n_experts, 1, hidden_size]

    @classmethod
    def of(
        cls, weights: Iterable[Expert], shape: ExpertsShape, dtype: torch.dtype, device: torch.device
    ) -> ExpertStack:
        """Return the experts with these weights, one after the other for each of `shape.numbers`."""
        n, hidden, ffn = len(shape.numbers), shape.hidden_size, shape.ffn_size
        gate_up = torch.empty(n, (1 + shape.gated) * ffn, hidden, dtype=dtype, device=device)
        down = torch.empty(n, hidden, ffn, dtype=dtype, device=device)
        biases = list[tuple[Tensor, Tensor]]()
        for index, expert in enumerate(weights):
            gate_up[index] = expert.gate_up.dense(dtype, device)
            down[index] = expert.down.dense(dtype, device)
            if expert.gate_up_bias is not None and expert.down_bias is not None:
                biases.append((expert.gate_up_bias, expert.down_bias))
        added = [torch.stack(parts).unsqueeze(1).to(device, dtype) for parts in zip(*biases, strict=True)]
        return cls(gate_up, down, *(added or (None, None)))

    def take(self, places: Tensor) -> ExpertStack:
        """Return the experts at `places` [n]."""
        parts = (self.gate_up, self.down, self.gate_up_bias, self.down_bias)
        gate_up, down, *biases = (None if part is None else part.index_select(0, places) for part in parts)
        assert gate_up is not None
        assert down is not None
        return ExpertStack(gate_up, down, *biases)

    def multiply(self, x: Tensor, gate: Elementwise) -> Tensor:
        """Return down(gate(gate_up(x))) of x [n_experts, n, hidden_size]."""
        hidden = _product(x, self.gate_up, self.gate_up_bias)
        return _product(gate(hidden.flatten(0, 1)).view(*hidden.shape[:2], -1), self.down, self.down_bias)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    product = torch.bmm(x, weight.mT)
    return product if bias is None else product + bias


class TorchExperts:
    """Every expert computes every row, whichever are chosen, so that the host waits for nothing and reads nothing."""

    def __init__(self, stack: ExpertStack, shape: ExpertsShape, router: Router, gate: Elementwise) -> None:
        """`stack`: the experts of `shape`."""
        self._stack, self._shape, self._route, self._gate = stack, shape, router, gate

    def __call__(self, x: Tensor, logits: Tensor) -> Tensor:
        """Return this rank's summand of [n, hidden_size]."""
        weights, chosen = self._route(logits)
        places, absent = self.places(chosen)
        inputs = x.expand(len(self._shape.numbers), *x.shape)
        if self._shape.routing.on_inputs:
            numbers = self._shape.numbers
            factors = torch.zeros_like(logits, dtype=weights.dtype).scatter_(1, chosen, weights)  # [n, n_experts]
            inputs = inputs * factors[:, numbers.start : numbers.stop].t().unsqueeze(-1).to(x.dtype)
        every = self._stack.multiply(inputs, self._gate)  # [n_own, n, hidden_size]
        terms = every[places, torch.arange(len(x), device=x.device).unsqueeze(-1)]  # [n, n_active, hidden_size]
        return weighted_sum(terms.masked_fill(absent, 0), weights, self._shape.routing)

    def places(self, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Return which of this rank's experts the `chosen` [n, n_active] are, and where they are another rank's.

        [n, n_active], in which another rank's is 0, and [n, n_active, 1].
        """
        places = chosen - self._shape.numbers.start
        absent = (places < 0) | (places >= len(self._shape.numbers))
        return places.masked_fill(absent, 0), absent.unsqueeze(-1)


class ExpertLoop:
    """Every expert computes the rows that chose it, one expert after the other: the host reads how many they are."""

    def __init__(self, experts: Sequence[Elementwise], shape: ExpertsShape, router: Router) -> None:
        """`experts`: [n, hidden_size] -> [n, hidden_size] each."""
        self._experts, self._shape, self._route = experts, shape, router

    def __call__(self, x: Tensor, logits: Tensor) -> Tensor:
        """Return this rank's summand of [n, hidden_size]."""
        weights, chosen = self._route(logits)
        n, n_active = chosen.shape
        by_expert = torch.argsort(chosen.view(-1), stable=True)  # permutation of n * n_active places
        counts = torch.bincount(chosen.view(-1), minlength=logits.shape[1]).tolist()
        out = x.new_zeros(n * n_active, x.shape[1])
        first = self._shape.numbers.start
        start = sum(counts[:first])
        for expert, count in zip(self._experts, counts[first:], strict=False):
            if count:
                places = by_expert[start : start + count]
                rows = x.index_select(0, places // n_active)
                if self._shape.routing.on_inputs:
                    rows = rows * weights.view(-1, 1).index_select(0, places).to(x.dtype)
                out.index_copy_(0, places, expert(rows))
            start += count
        return weighted_sum(out.view(n, n_active, -1), weights, self._shape.routing)


class Router:
    """Chooses each row's experts."""

    def __init__(self, routing: ExpertRouting, correction: Tensor | None) -> None:
        """`correction`: [n_experts], added to the scores for the choice."""
        self._routing, self._correction = routing, None if correction is None else correction.float()

    def __call__(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights of each row's best experts and their numbers, both [n, n_active].

        `logits`: [n, n_experts], of all ranks' experts.
        """
        routing, exact = self._routing, logits.float()
        if routing.scores == "sparsemixer":
            return self._one_by_one(exact)
        scores = sigmoid(exact) if routing.scores == "sigmoid" else exact.softmax(dim=-1)
        choice = scores if self._correction is None else scores + self._correction
        if routing.n_kept_groups < routing.n_groups:
            choice = choice.masked_fill(self._outside(choice), -torch.inf)
        chosen = torch.topk(choice, routing.n_active, dim=-1).indices
        weights = scores.gather(-1, chosen)
        if routing.normalise:
            weights = weights / _sum_in_order(weights)
        return weights * routing.scale if routing.scale != 1.0 else weights, chosen

    def _one_by_one(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Choose as SparseMixer (arXiv:2409.12136): an expert's weight is its share among the left ones near it."""
        left, weights, chosen = logits, list[Tensor](), list[Tensor]()
        for _ in range(self._routing.n_active):
            best, index = left.max(dim=-1, keepdim=True)
            far = (best - logits) / torch.maximum(logits.abs(), best) > 2 * self._routing.jitter
            weights.append(left.masked_fill(far, -torch.inf).softmax(dim=-1).gather(-1, index))
            chosen.append(index)
            left = left.scatter(-1, index, -torch.inf)
        return torch.cat(weights, dim=-1), torch.cat(chosen, dim=-1)

    def _outside(self, choice: Tensor) -> Tensor:
        """Whether an expert's group is not among the best, [n, n_experts]."""
        routing = self._routing
        groups = choice.view(len(choice), routing.n_groups, -1)  # [n, n_groups, size]
        best = _sum_in_order(groups.topk(2 if routing.group_score == "top2" else 1, dim=-1).values).squeeze(-1)
        best_groups = torch.topk(best, routing.n_kept_groups, dim=-1).indices
        outside = torch.ones_like(best, dtype=torch.bool).scatter_(-1, best_groups, False)
        return outside.unsqueeze(-1).expand_as(groups).flatten(1)


def sigmoid(x: Tensor) -> Tensor:
    """Return 1 / (1 + exp(-x)), whose bits do not depend on the number's place among the others.

    Torch's kernel for CPUs computes the last numbers by other code, that of softmax does not.
    """
    return torch.stack((x, torch.zeros_like(x)), dim=-1).softmax(dim=-1, dtype=torch.float32)[..., 0].to(x.dtype)


def weighted_sum(terms: Tensor, weights: Tensor, routing: ExpertRouting) -> Tensor:
    """Return [n, size] of terms [n, n_active, size] and their weights [n, n_active]."""
    weighted = terms if routing.on_inputs else terms * weights.to(terms.dtype).unsqueeze(-1)
    return _sum_in_order(weighted.transpose(1, 2)).squeeze(-1)


def _sum_in_order(x: Tensor) -> Tensor:
    """Sum the last, short dimension in order, which a reduction kernel does not guarantee: [..., 1]."""
    total = x[..., :1].clone()
    for index in range(1, x.shape[-1]):
        total += x[..., index : index + 1]
    return total
