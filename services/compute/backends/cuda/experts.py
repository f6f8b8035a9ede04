"""The experts of a mixture on CUDA: nothing that a captured step computes is read by the host."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from services.compute.backends.base import Elementwise
from services.compute.backends.cuda.graph import MAX_ROWS
from services.compute.backends.shapes import ExpertsShape
from services.compute.backends.torch.experts import ExpertLoop, ExpertStack, Router, TorchExperts, weighted_sum

_COPIED = 3  # times that a weight crosses memory when it is copied first: read, written, read


class CudaExperts:
    """Reads as few bytes of weights as possible without the host.

    Few rows: copies of the experts that they chose. More: all experts, once for all rows. More than a graph holds: the
    host reads which are chosen, since all experts on all rows are too much to compute.
    """

    def __init__(self, stack: ExpertStack, shape: ExpertsShape, router: Router, gate: Elementwise) -> None:
        """`stack`: the experts of `shape`."""
        self._shape, self._stack, self._route, self._gate = shape, stack, router, gate
        self._all = TorchExperts(stack, shape, router, gate)
        each = [_expert(stack, index, gate) for index in range(len(shape.numbers))]
        self._loop = ExpertLoop(each, shape, router)

    def __call__(self, x: Tensor, logits: Tensor) -> Tensor:
        """Return this rank's summand of [n, hidden_size]."""
        if len(x) > MAX_ROWS:
            return self._loop(x, logits)
        if _COPIED * len(x) * self._shape.routing.n_active < len(self._shape.numbers):
            return self._copied(x, logits)
        return self._all(x, logits)

    def _copied(self, x: Tensor, logits: Tensor) -> Tensor:
        weights, chosen = self._route(logits)
        places, absent = self._all.places(chosen)
        own = places.view(-1)
        each = x.unsqueeze(1).expand(*chosen.shape, -1).reshape(len(own), 1, -1)  # [n * n_active, 1, hidden_size]
        if self._shape.routing.on_inputs:
            each = each * weights.view(-1, 1, 1).to(x.dtype)
        terms = self._stack.take(own).multiply(each, self._gate).view(*chosen.shape, -1)
        return weighted_sum(terms.masked_fill(absent, 0), weights, self._shape.routing)


def _expert(stack: ExpertStack, index: int, gate: Elementwise) -> Elementwise:
    gate_up, down = stack.gate_up[index], stack.down[index]
    biases = (stack.gate_up_bias, stack.down_bias)
    gate_up_bias, down_bias = (None if bias is None else bias[index, 0] for bias in biases)
    return lambda x: F.linear(gate(F.linear(x, gate_up, gate_up_bias)), down, down_bias)
