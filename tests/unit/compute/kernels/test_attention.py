"""Attention over the paged cache: equal to its definition, with any numbers in slots that were not written."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from services.compute.backends.kv_format import KvFormat, plain_format
from services.compute.backends.shapes import KvShape
from services.compute.kernels.attention import VectorAttention
from services.compute.kernels.bfloat16 import Bfloat16Kernels
from tests.unit.compute.kernels.conftest import Load
from tests.unit.compute.kernels.numbers import HALF_ULP, assert_rounded, normal


@dataclass(frozen=True)
class KernelCase:
    work: tuple[tuple[int, int], ...]  # (rows, keys) of each sequence
    n_kv: int = 1
    group: int = 1
    head_dim: int = 32
    block_size: int = 16
    window: int = 0
    softcap: float = 0.0
    sharpness: float = 1.0  # scale of the softmax's scores
    seed: int = 0

    @property
    def scale(self) -> float:
        return self.sharpness * self.head_dim**-0.5

    @property
    def shape(self) -> KvShape:
        return KvShape(self.block_size, self.n_kv, self.head_dim)


@st.composite
def works(draw: st.DrawFn) -> tuple[tuple[int, int], ...]:
    lengths = draw(st.lists(st.integers(1, 150), min_size=1, max_size=4))
    return tuple((draw(st.one_of(st.just(1), st.integers(1, length))), length) for length in lengths)


def cases(head_dims: list[int], block_sizes: list[int]) -> st.SearchStrategy[KernelCase]:
    return st.builds(
        KernelCase,
        work=works(),
        n_kv=st.integers(1, 3),
        group=st.integers(1, 20),
        head_dim=st.sampled_from(head_dims),
        block_size=st.sampled_from(block_sizes),
        window=st.one_of(st.just(0), st.integers(1, 100)),
        softcap=st.sampled_from([0.0, 1.5, 30.0]),
        sharpness=st.sampled_from([0.3, 1.0, 6.0]),
        seed=st.integers(0, 99),
    )


CASES = cases([32, 64, 96, 128, 160, 192, 224, 256], [16, 32, 48])


# So many sequences that a thread takes several together, with prompts among them.
MANY = KernelCase(
    (*((1, 20 + i) for i in range(23)), (17, 40), (1, 90), (2, 2), *((1, 70 - i) for i in range(20))), n_kv=3, group=3
)
# Of which a thread takes two of five heads together, and the last one alone; more heads than a thread takes at once.
SOME = KernelCase(tuple((1, 30 + 9 * i) for i in range(12)), n_kv=5, group=2)
WIDE = KernelCase(((1, 50), (2, 40), (1, 33)), group=140)
DRAFT = KernelCase(((17, 90), (1, 33)), group=3)  # the rows of its only head are divided among threads


@dataclass(frozen=True)
class KernelKind:
    """One of our attention kernels in one dtype."""

    dtype: torch.dtype
    library: str
    on_threads: Callable[[int], Bfloat16Kernels | VectorAttention]

    @property
    def kernels(self) -> Bfloat16Kernels | VectorAttention:
        return self.on_threads(3)

    @property
    def weight_error(self) -> float:
        """Of a weight when it meets its value, relative: products of bfloat16 alone round it to that."""
        return 0.0 if self.library in ("avx512", "avx2", "neon") else HALF_ULP * 1.01


def opened(what: str, load: Load) -> KernelKind:
    library, _, dtype = what.partition(":")
    load(what, 3)
    return KernelKind(getattr(torch, dtype or "bfloat16"), library, functools.partial(load, what))


@pytest.fixture(
    params=[
        "amx",
        *(f"{x}{of}" for x in ("avx512_bf16", "neon_bf16") for of in ("", ":bfloat16")),
        *(f"{x}{of}" for x in ("avx512", "avx2", "neon") for of in ("", ":bfloat16", ":float32")),
    ]
)
def kind(request: pytest.FixtureRequest, load: Load) -> KernelKind:
    return opened(request.param, load)


@dataclass(frozen=True)
class Data:
    q: torch.Tensor  # [rows, heads * head_dim], in the middle of wider rows
    cache: torch.Tensor  # as its format has it, [blocks, block_size, 2, n_kv, head_dim] of plain numbers
    starts: torch.Tensor
    lengths: torch.Tensor
    tables: torch.Tensor

    def alone(self, case: KernelCase, row: int) -> Data:
        """A row as a decode by itself."""
        index = int(torch.searchsorted(self.starts, row, right=True)) - 1
        length = int(self.lengths[index] - (self.starts[index + 1] - 1 - row))
        table = self.tables[index : index + 1, : -(-length // case.block_size)].contiguous()
        return Data(self.q[row : row + 1], self.cache, torch.tensor([0, 1]), torch.tensor([length]), table)


def lay_out(case: KernelCase, dtype: torch.dtype, codes: KvFormat | None = None) -> Data:
    """Keys in scattered blocks, in numbers of `dtype` or in codes of 8 bits. Block 0 is zero.

    What is no key's slot is NaN, or has the largest code and a scale that is not a number.
    """
    kv_format = codes or plain_format(dtype)
    counts = [-(-keys // case.block_size) for _, keys in case.work]
    order = (torch.randperm(sum(counts) + 3, generator=torch.Generator().manual_seed(case.seed)) + 1).tolist()
    cache = kv_format.allocate(len(order) + 1, case.shape, torch.device("cpu"))
    cache[1:] = 127 if codes else torch.nan  # also the bytes of scales: 0x7f7f is 3e38, which overflows
    tables = torch.zeros(len(counts), max(counts) + case.seed % 2, dtype=torch.int64)
    starts = [0]
    for index, (rows, keys) in enumerate(case.work):
        tables[index, : counts[index]] = torch.tensor([order.pop() for _ in range(counts[index])])
        written = normal(case.seed + index, keys, case.shape.width, dtype=dtype)
        kv_format.write(cache, case.shape, slots_of(tables[index], keys, case), written)
        starts.append(starts[-1] + rows)
    width = case.n_kv * case.group * case.head_dim
    q = normal(case.seed + 50, starts[-1], width + 64, dtype=dtype)[:, 32 : 32 + width]
    return Data(q, cache, torch.tensor(starts), torch.tensor([keys for _, keys in case.work]), tables)


def slots_of(table: torch.Tensor, keys: int, case: KernelCase) -> torch.Tensor:
    positions = torch.arange(keys)
    return table[positions // case.block_size] * case.block_size + positions % case.block_size


def attend(kernels: Bfloat16Kernels | VectorAttention, case: KernelCase, data: Data) -> torch.Tensor:
    out = torch.full((data.q.shape[0] + 1, data.q.shape[1]), torch.nan, dtype=data.q.dtype)
    numbers = (case.n_kv, case.group, case.head_dim, case.block_size, case.scale, case.softcap, case.window)
    kernels.attend(data.q, out[:-1], data.cache, numbers, (data.starts, data.lengths, data.tables))
    assert out[-1].isnan().all()
    return out[:-1]


def exactly(case: KernelCase, data: Data) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition in float64, and the mean size of the values that each result is made of."""
    results, sizes = [], []
    for index, (rows, keys) in enumerate(case.work):
        kv = data.cache.flatten(0, 1)[slots_of(data.tables[index], keys, case)].double()  # [keys, 2, n_kv, head_dim]
        k, v = (part.repeat_interleave(case.group, 1).transpose(0, 1) for part in kv.unbind(1))  # [heads, keys, dim]
        q = data.q[data.starts[index] : data.starts[index + 1]].double()
        q = q.view(rows, case.n_kv * case.group, case.head_dim).transpose(0, 1)  # [heads, rows, dim]
        scores = q @ k.transpose(1, 2) * case.scale
        if case.softcap:
            scores = (scores / case.softcap).tanh() * case.softcap
        distance = torch.arange(keys - rows, keys).unsqueeze(1) - torch.arange(keys)
        weights = scores.masked_fill((distance < 0) | (distance >= (case.window or keys)), -torch.inf).softmax(-1)
        results.append((weights @ v).transpose(0, 1).flatten(1))
        sizes.append((weights @ v.abs()).transpose(0, 1).flatten(1))
    return torch.cat(results), torch.cat(sizes)


# 31 to 33 and 63 to 65 keys lie around the kernel's blocks; 17 query heads do not fit into one tile.
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(case=CASES)
@example(KernelCase(((31, 31), (1, 32), (2, 33), (1, 1)), n_kv=2, group=17, head_dim=256))
@example(KernelCase(((64, 65), (1, 63), (3, 64)), n_kv=3, group=3, head_dim=96, window=32, softcap=1.5))
@example(KernelCase(((1, 700), (90, 700)), group=7, head_dim=128, block_size=32, window=100, sharpness=6.0))
@example(KernelCase(((40, 40),), group=16, window=1))
@example(KernelCase(((9, 70),), group=15))
@example(MANY)
@example(SOME)
@example(WIDE)
def test_attention_equals_its_definition(kind: KernelKind, case: KernelCase) -> None:
    data = lay_out(case, kind.dtype)
    exact, sizes = exactly(case, data)
    # Scores and sums are rounded to float32.
    assert_rounded(attend(kind.kernels, case, data), exact, sizes * (kind.weight_error + 2e-5 * case.sharpness))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(case=cases([8, 24, 40, 72, 80, 200, 248], [1, 5, 16, 24]))
def test_vectors_take_more_shapes(kind: KernelKind, case: KernelCase) -> None:
    if kind.library == "amx":
        pytest.skip("tiles are of 32 values and 16 positions")
    data = lay_out(case, kind.dtype)
    exact, sizes = exactly(case, data)
    assert_rounded(attend(kind.kernels, case, data), exact, sizes * (kind.weight_error + 2e-5 * case.sharpness))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(case=CASES, chosen=st.integers(0, 10_000))
def test_a_row_is_the_same_alone_and_in_a_batch(kind: KernelKind, case: KernelCase, chosen: int) -> None:
    """As a decode by itself, although it stood in the middle of a prompt among other sequences."""
    data = lay_out(case, kind.dtype)
    together = attend(kind.kernels, case, data)
    row = chosen % together.shape[0]
    assert torch.equal(attend(kind.kernels, case, data.alone(case, row))[0], together[row])


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(case=CASES)
@example(MANY)
@example(SOME)
@example(WIDE)
@example(DRAFT)
def test_the_number_of_threads_changes_no_bit(kind: KernelKind, case: KernelCase) -> None:
    data = lay_out(case, kind.dtype)
    expected = attend(kind.on_threads(1), case, data)
    assert torch.equal(attend(kind.on_threads(2), case, data), expected)
    assert torch.equal(attend(kind.kernels, case, data), expected)


def test_scores_far_apart_and_equal(kind: KernelKind) -> None:
    """One key takes everything; or all keys are alike, and the mean of the values is exact."""
    case = KernelCase(((1, 96),), head_dim=64, sharpness=1000.0)
    data = lay_out(case, kind.dtype)
    keys = data.cache.flatten(0, 1)[slots_of(data.tables[0], 96, case)]
    best = int((keys[:, 0, 0].double() @ data.q[0].double()).argmax())
    assert_rounded(attend(kind.kernels, case, data)[0], keys[best, 1, 0].double(), 1e-6)
    data.q[:] = 0
    exact, sizes = exactly(case, data)
    assert_rounded(attend(kind.kernels, case, data), exact, sizes * 1e-6)  # 2^0 is exact, and so is its rounding
