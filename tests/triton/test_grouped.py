"""The experts of a mixture on GPUs against the reference, which computes every expert on every row."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from services.compute.backends.base import Expert
from services.compute.backends.cuda.fused import TritonOps
from services.compute.backends.cuda.grouped import GroupedExperts
from services.compute.backends.shapes import ExpertRouting, ExpertsShape
from services.compute.backends.torch.ops import TorchOps
from services.compute.backends.weights import Dense, Stacked
from tests.triton.test_attention import DEVICE

LIMITS = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 3e-3}
N_EXPERTS, HIDDEN, FFN = 5, 72, 40


def mixture(dtype: torch.dtype, numbers: range, *, biased: bool) -> Iterator[Expert]:
    for number in numbers:
        generator = torch.Generator().manual_seed(number)

        def normal(*shape: int, generator: torch.Generator = generator) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(dtype) / 8

        up, down = Stacked((Dense(normal(2 * FFN, HIDDEN)),)), Stacked((Dense(normal(HIDDEN, FFN)),))
        yield Expert(up, down, normal(2 * FFN) if biased else None, normal(HIDDEN) if biased else None)


@settings(max_examples=6)
@given(
    n=st.integers(1, 9),
    numbers=st.sampled_from([range(N_EXPERTS), range(2, 4)]),
    biased=st.booleans(),
    on_inputs=st.booleans(),
    dtype=st.sampled_from([*LIMITS]),
)
@example(n=100, numbers=range(N_EXPERTS), biased=True, on_inputs=False, dtype=torch.bfloat16)
def test_experts(n: int, numbers: range, biased: bool, on_inputs: bool, dtype: torch.dtype) -> None:
    """Some experts get no row, some rows are another rank's; an expert's rows fill several tiles or a part of one."""
    generator = torch.Generator().manual_seed(n)
    x = torch.randn(n, HIDDEN, generator=generator).to(DEVICE, dtype)
    logits = torch.randn(n, N_EXPERTS, generator=generator).to(DEVICE)
    shape = ExpertsShape(numbers, HIDDEN, FFN, ExpertRouting(2, normalise=True, on_inputs=on_inputs))
    experts = TritonOps(dtype, DEVICE).experts(mixture(dtype, numbers, biased=biased), shape, "silu")
    assert isinstance(experts, GroupedExperts)
    reference = TorchOps(torch.float32, DEVICE).experts(mixture(dtype, numbers, biased=biased), shape, "silu")
    actual, exact = experts(x, logits), reference(x.float(), logits)
    assert (actual.float() - exact).abs().max() <= LIMITS[dtype] * (1 + exact.abs().max())
