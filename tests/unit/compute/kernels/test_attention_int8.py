"""Attention over a cache in int8: what its definition says of the numbers that codes stand for, and what is written."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from services.compute.backends.kv_formats import int8
from services.compute.backends.shapes import KvShape
from services.compute.kernels.bfloat16 import Bfloat16Kernels
from tests.unit.compute.kernels.conftest import Load
from tests.unit.compute.kernels.numbers import assert_rounded, normal
from tests.unit.compute.kernels.test_attention import (
    MANY,
    SOME,
    WIDE,
    Data,
    KernelCase,
    KernelKind,
    attend,
    cases,
    exactly,
    lay_out,
    opened,
    slots_of,
)

INT8 = int8.FORMAT.open()

CASES = cases([8, 24, 64, 80, 128, 248, 256], [16, 32, 48])
ROUNDED = 2e-4  # error of a score, and of a value of size 1: queries and weights are rounded to 16 bit
_slow = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


@pytest.fixture(
    params=["amx", "avx512_bf16", "avx512", "avx2", "avx2:float32", "avx512:float32", "neon_bf16", "neon:float32"]
)
def kind(request: pytest.FixtureRequest, load: Load) -> KernelKind:
    return opened(request.param, load)


def as_numbers(case: KernelCase, data: Data) -> Data:
    """The same with what the codes stand for: [blocks, block_size, 2, n_kv, head_dim]."""
    n_blocks = len(data.cache)
    numbers = INT8.read(data.cache, case.shape, torch.arange(n_blocks * case.block_size), torch.float32, None)
    kv = numbers.view(n_blocks, case.block_size, 2, case.n_kv, case.head_dim)
    return Data(data.q, kv, data.starts, data.lengths, data.tables)


@_slow
@given(case=CASES)
@example(KernelCase(((31, 31), (1, 32), (2, 33), (1, 1)), n_kv=2, group=17, head_dim=256))
@example(KernelCase(((64, 65), (1, 63), (3, 64)), n_kv=3, group=3, head_dim=96, window=32, softcap=1.5))
@example(KernelCase(((40, 40),), group=16, window=1))
@example(MANY)
@example(SOME)
@example(WIDE)
def test_attention_equals_its_definition(kind: KernelKind, case: KernelCase) -> None:
    data = lay_out(case, kind.dtype, INT8)
    exact, sizes = exactly(case, as_numbers(case, data))
    slack = ROUNDED * (1 + max(1.0, case.sharpness) * sizes)
    assert_rounded(attend(kind.kernels, case, data), exact, slack)


@_slow
@given(case=CASES, chosen=st.integers(0, 10_000))
def test_a_row_is_the_same_alone_and_in_a_batch(kind: KernelKind, case: KernelCase, chosen: int) -> None:
    data = lay_out(case, kind.dtype, INT8)
    together = attend(kind.kernels, case, data)
    row = chosen % together.shape[0]
    assert torch.equal(attend(kind.kernels, case, data.alone(case, row))[0], together[row])
    assert torch.equal(attend(kind.on_threads(1), case, data), together)


def test_non_finite_values_reach_only_rows_that_read_their_block(kind: KernelKind) -> None:
    """By a row that reads such a value or query; by no other."""
    case = KernelCase(((1, 40), (1, 40), (1, 40)), n_kv=2, group=2, head_dim=64)
    data, shape = lay_out(case, kind.dtype, INT8), case.shape
    expected = attend(kind.kernels, case, data).view(3, 4, 64)
    row = normal(case.seed, 40, shape.width, dtype=kind.dtype)[20:21]
    row[0, shape.width // 2 + 64 + 7] = torch.nan  # second head's value
    INT8.write(data.cache, shape, slots_of(data.tables[0], 40, case)[20:21], row)
    data.q[1, 70] = torch.nan
    actual = attend(kind.kernels, case, data).view(3, 4, 64)
    wrong = torch.tensor([[False, False, True, True], [False, True, False, False], [False] * 4])
    assert torch.equal(actual.isnan().all(-1), wrong)
    assert torch.equal(actual[~wrong], expected[~wrong])


@pytest.mark.parametrize(("n", "head_dim"), [(1, 64), (40, 24), (70, 128), (5, 8)])
def test_rows_are_written_like_torch(kernels: Bfloat16Kernels, n: int, head_dim: int) -> None:
    shape, block = KvShape(16, 3, head_dim), torch.device("cpu")
    rows = normal(n, n, shape.width + 32)[:, 8 : 8 + shape.width]
    sizes = torch.tensor([1.0, 1e-37, 1e-39, 1e37, 0.0])
    rows *= sizes[torch.arange(n) % 5].unsqueeze(1).bfloat16()
    slots = torch.randperm(6 * 16, generator=torch.Generator().manual_seed(n))[:n] + 16
    expected, actual = (INT8.allocate(8, shape, block) for _ in range(2))
    INT8.write(expected, shape, slots, rows)
    kernels.write_codes(actual, slots, rows, 2 * shape.n_kv_heads, head_dim, 16)
    assert torch.equal(actual, expected)


def test_a_head_with_a_number_that_is_not_finite_reads_as_such(kernels: Bfloat16Kernels) -> None:
    shape, slots = KvShape(16, 1, 32), torch.tensor([3, 4])
    rows = normal(0, 2, 64)
    rows[0, 7], rows[1, 40] = torch.nan, -torch.inf
    cache = INT8.allocate(1, shape, torch.device("cpu"))
    kernels.write_codes(cache, slots, rows, 2, 32, 16)
    read = INT8.read(cache, shape, slots, torch.float32, None)
    assert read.isnan().view(2, 2, 32).all(-1).tolist() == [[True, False], [False, True]]
