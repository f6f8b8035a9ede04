"""The experts of a mixture are what their definition says, on every device; a captured step is not read by the host."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from services.compute.backends.base import Expert, Experts, Ops
from services.compute.backends.cpu.ops import OneDnnOps
from services.compute.backends.cuda.graph import MAX_ROWS
from services.compute.backends.cuda.grouped import GroupedExperts
from services.compute.backends.cuda.ops import CudaOps
from services.compute.backends.shapes import ExpertRouting, ExpertsShape
from services.compute.backends.torch.experts import ExpertStack, Router
from services.compute.backends.torch.ops import TorchOps
from services.compute.backends.weights import Dense, Stacked

N_EXPERTS, N_ACTIVE, HIDDEN, FFN = 32, 2, 24, 40
CPU = torch.device("cpu")
# In float64, where no tie is near and orders of sums do not show: every path of every device, run on a CPU.
OPS: dict[str, Callable[[], Ops]] = {
    "the reference": lambda: TorchOps(torch.float64, CPU),
    "a CPU": lambda: OneDnnOps(torch.float64),
    "CUDA": lambda: CudaOps(torch.float64, CPU),
}
# On CUDA the first are computed with copies of the experts that are chosen, the last by the host's choice.
ROWS = (1, 2, 3, 61, MAX_ROWS, MAX_ROWS + 1)


def tables() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    gate_up = torch.randn(N_EXPERTS, 2 * FFN, HIDDEN, generator=generator, dtype=torch.float64)
    return gate_up, torch.randn(N_EXPERTS, HIDDEN, FFN, generator=generator, dtype=torch.float64)


def make(ops: Ops, numbers: range, *, normalise: bool = True) -> Experts:
    def weights() -> Iterator[Expert]:
        for number in numbers:
            gate, up = gate_up[number].chunk(2)
            yield Expert(Stacked((Dense(gate), Dense(up))), Stacked((Dense(down[number]),)))

    gate_up, down = tables()
    return ops.experts(weights(), ExpertsShape(numbers, HIDDEN, FFN, ExpertRouting(N_ACTIVE, normalise)), "silu")


@functools.cache
def defined(n: int, numbers: range, *, normalise: bool) -> Tensor:
    """Row by row, expert by expert."""
    (x, logits), (gate_up, down) = inputs(n), tables()
    out = torch.zeros_like(x)
    for row, scores in enumerate(logits.softmax(-1)):
        chosen = scores.argsort(descending=True)[:N_ACTIVE].tolist()
        whole = scores[chosen].sum() if normalise else 1
        for number in set(chosen) & set(numbers):
            gate, up = (gate_up[number] @ x[row]).chunk(2)
            out[row] += scores[number] / whole * (down[number] @ (F.silu(gate) * up))
    return out


def inputs(n: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(n)
    x, logits = (torch.randn(n, size, generator=generator, dtype=torch.float64) for size in (HIDDEN, N_EXPERTS))
    return x, logits


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("numbers", [range(N_EXPERTS), range(16, N_EXPERTS)], ids=str)
@pytest.mark.parametrize("ops", OPS)
def test_experts_equal_their_definition(ops: str, numbers: range, normalise: bool) -> None:
    experts = make(OPS[ops](), numbers, normalise=normalise)
    for n in ROWS:
        exact = defined(n, numbers, normalise=normalise)
        # The weights of experts are float32.
        assert (experts(*inputs(n)) - exact).abs().max() <= 1e-6 * exact.abs().max(), n


def test_experts_in_one_product_are_never_read_by_the_host() -> None:
    device, shape = torch.device("meta"), ExpertsShape(range(16), HIDDEN, FFN, ExpertRouting(N_ACTIVE, normalise=True))
    gate_up, down = (table[:16].to(device) for table in tables())
    launches = defaultdict[tuple[int, int], Callable[..., None]](lambda: lambda *_, **__: None)
    stack, gate = ExpertStack(gate_up, down, None, None), TorchOps(torch.float64, device).gate("silu")
    experts = GroupedExperts(SimpleNamespace(product=launches), stack, shape, Router(shape.routing, None), gate)
    for n in ROWS:
        x, logits = (torch.empty(n, size, dtype=torch.float64, device=device) for size in (HIDDEN, N_EXPERTS))
        assert experts(x, logits).shape == x.shape
    assert len(launches) > len(ROWS)


def test_no_experts_of_a_captured_step_are_read_by_the_host() -> None:
    """Meta tensors have shapes and no numbers: an operation that reads one raises, as the count of an expert's rows."""
    device = torch.device("meta")
    experts = make(CudaOps(torch.bfloat16, device), range(16))
    for n in ROWS:
        x, logits = (torch.empty(n, size, dtype=torch.bfloat16, device=device) for size in (HIDDEN, N_EXPERTS))
        if n > MAX_ROWS:
            with pytest.raises(NotImplementedError, match="bincount"):
                experts(x, logits)
        else:
            actual = experts(x, logits)
            assert (actual.shape, actual.device, actual.dtype) == (x.shape, device, torch.bfloat16)
