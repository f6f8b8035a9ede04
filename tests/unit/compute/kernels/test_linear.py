"""Linear layers: every sum is there, correctly rounded, and the same in any company."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from services.compute.backends.cpu.linear import KernelLinear
from services.compute.backends.weights import Dense, Stacked
from services.compute.kernels.bfloat16 import Bfloat16Kernels
from tests.unit.compute.kernels.conftest import OnThreads
from tests.unit.compute.kernels.numbers import FLOAT32, assert_rounded, normal

ROWS = st.one_of(st.integers(1, 70), st.sampled_from([255, 256, 257, 287, 288, 513, 531]))
# 32 steps and more: kernels may add up a long row in parts, with the sums in memory meanwhile.
STEPS = st.one_of(st.integers(1, 12), st.sampled_from([32, 33, 70]))
SHAPES = {"n": ROWS, "n_out": st.integers(1, 330), "steps": STEPS}


def multiply(
    kernels: Bfloat16Kernels,
    x: torch.Tensor,
    packed: torch.Tensor,
    bias: torch.Tensor | None,
    n_out: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Unwritten numbers are NaN; writes beyond the result are noticed."""
    guarded = torch.full((x.shape[0] + 1, n_out), torch.nan, dtype=dtype)
    kernels.linear(x, packed, bias, guarded[:-1], kernels.spare(x.shape[1]).fill_(torch.nan))
    assert guarded[-1].isnan().all()
    return guarded[:-1]


@given(**SHAPES, bias=st.booleans(), dtype=st.sampled_from([torch.bfloat16, torch.float32]), strided=st.booleans())
@example(n=531, n_out=257, steps=9, bias=True, dtype=torch.float32, strided=True)
@example(n=391, n_out=129, steps=70, bias=True, dtype=torch.bfloat16, strided=True)
def test_products_are_exact_up_to_rounding(
    kernels: Bfloat16Kernels, n: int, n_out: int, steps: int, bias: bool, dtype: torch.dtype, strided: bool
) -> None:
    n_in = 32 * steps
    stored = normal(1, n, n_in + 48)
    x = stored[:, 16 : 16 + n_in] if strided else stored[:, :n_in].contiguous()
    weight = normal(2, n_out, n_in)
    added = normal(3, n_out, scale=5.0).float() if bias else None
    actual = multiply(kernels, x, kernels.pack(weight), added, n_out, dtype)
    exact = x.double() @ weight.double().T + (0 if added is None else added.double())
    sizes = x.double().abs() @ weight.double().abs().T
    assert_rounded(actual, exact, sizes * FLOAT32 * 4)


@given(**SHAPES, place=st.integers(0, 1000), seed=st.integers(0, 1000))
def test_a_row_is_the_same_alone_and_at_any_place(
    kernels: Bfloat16Kernels, n: int, n_out: int, steps: int, place: int, seed: int
) -> None:
    packed, row = kernels.pack(normal(2, n_out, 32 * steps)), normal(seed, 1, 32 * steps)
    alone = multiply(kernels, row, packed, None, n_out, torch.float32)
    company = normal(seed + 1, n, 32 * steps)
    company[place % n] = row
    actual = multiply(kernels, company, packed, None, n_out, torch.float32)
    assert torch.equal(actual[place % n], alone[0])


@given(**SHAPES)
def test_neighbours_that_are_not_finite_stay_with_themselves(
    kernels: Bfloat16Kernels, n: int, n_out: int, steps: int
) -> None:
    packed, x = kernels.pack(normal(2, n_out, 32 * steps)), normal(1, n, 32 * steps)
    expected = multiply(kernels, x, packed, None, n_out, torch.float32)
    x[::2] = torch.nan
    actual = multiply(kernels, x, packed, None, n_out, torch.float32)
    assert actual[::2].isnan().all()
    assert torch.equal(actual[1::2], expected[1::2])


@given(**SHAPES)
def test_the_number_of_threads_changes_no_bit(on_threads: OnThreads, n: int, n_out: int, steps: int) -> None:
    x, weight = normal(1, n, 32 * steps), normal(2, n_out, 32 * steps)
    actual = [
        multiply(kernels, x, kernels.pack(weight), None, n_out, torch.float32)
        for kernels in (on_threads(1), on_threads(2), on_threads(3))
    ]
    assert torch.equal(actual[0], actual[1])
    assert torch.equal(actual[0], actual[2])


@pytest.mark.parametrize("small", ["inputs", "weights"])
def test_subnormal_numbers_count_as_zero_where_pairs_are_multiplied(kernels: Bfloat16Kernels, small: str) -> None:
    """As the multiplications for bfloat16 take them. Half of the small numbers are subnormal, no product is."""
    numbers = {"inputs": normal(1, 7, 96, scale=2.0**60), "weights": normal(2, 70, 96, scale=2.0**60)}
    numbers[small] *= 2.0**-186
    x, weight = (values.double() for values in numbers.values())
    actual = multiply(kernels, numbers["inputs"], kernels.pack(numbers["weights"]), None, 70, torch.float32)
    if kernels.made_for not in ("AVX-512", "AVX2", "NEON"):
        x, weight = (values.where(values.abs() >= 2.0**-126, 0) for values in (x, weight))
    assert_rounded(actual, x @ weight.T, x.abs() @ weight.abs().T * FLOAT32 * 4)


@pytest.mark.parametrize("n_in", [1, 31, 48, 80, 96])
@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_pads_sizes_that_the_kernel_cannot_divide(kernels: Bfloat16Kernels, n_in: int, bias: bool) -> None:
    weight, x, added = normal(1, 50, n_in), normal(2, 19, n_in), normal(3, 50)
    layer = KernelLinear(kernels, Stacked((Dense(weight[:20]), Dense(weight[20:]))), added if bias else None)
    exact = x.double() @ weight.double().T + (added.double() if bias else 0)
    assert_rounded(layer(x), exact, x.double().abs() @ weight.double().abs().T * FLOAT32 * 4)
    ids = torch.tensor([49, 0, 20, 19, 0])
    assert torch.equal(layer.rows(ids), weight[ids])
    for outside in (-1, 50):
        with pytest.raises(IndexError, match="outside 0 to 49"):
            layer.rows(torch.tensor([3, outside]))


@given(n=ROWS, n_out=st.integers(1, 330), steps=STEPS, seed=st.integers(0, 99))
def test_rows_survive_packing_unchanged(kernels: Bfloat16Kernels, n: int, n_out: int, steps: int, seed: int) -> None:
    weight = normal(seed, n_out, 32 * steps)
    ids = torch.randint(n_out, (n,), generator=torch.Generator().manual_seed(seed))
    assert torch.equal(kernels.unpack(kernels.pack(weight), ids), weight[ids])
