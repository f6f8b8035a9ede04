"""The sums of adapters: against float64, alone and among rows of others, for sizes that fill no register."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from services.compute.kernels.bfloat16 import Bfloat16Kernels
from tests.unit.compute.kernels.numbers import assert_rounded, normal

SIZE = st.integers(1, 150)
SLOTS, MOST = 3, 9


@given(n=st.integers(1, 40), n_in=SIZE, n_out=SIZE, seed=st.integers(0, 99))
def test_each_row_gets_the_product_with_its_own_factors(
    kernels: Bfloat16Kernels, n: int, n_in: int, n_out: int, seed: int
) -> None:
    x, wide = normal(seed, n, n_in), normal(seed + 1, n, n_out + 5)
    a, b = normal(seed + 2, SLOTS, MOST, n_in), normal(seed + 3, SLOTS, MOST, n_out)
    a[:, 7:], b[:, 7:] = torch.nan, torch.nan  # beyond every rank
    ranks = torch.tensor([7, 0, 3])
    slots = torch.randint(-1, SLOTS, (n,), generator=torch.Generator().manual_seed(seed))
    y, before = wide[:, 2 : 2 + n_out], wide.clone()
    kernels.low_rank_(y, x, a, b, ranks, slots)
    for row, slot in enumerate(slots.tolist()):
        start, rank = before[row : row + 1, 2 : 2 + n_out], int(ranks[slot]) if slot >= 0 else 0
        if not rank:
            assert torch.equal(y[row : row + 1], start)
            continue
        inner = a[slot, :rank].double() @ x[row].double()
        exact = start.double() + inner @ b[slot, :rank].double()
        sums = a[slot, :rank].double().abs() @ x[row].double().abs() @ b[slot, :rank].double().abs()
        assert_rounded(y[row : row + 1], exact, 1e-6 * float(sums.max()))
        alone = start.clone()
        kernels.low_rank_(alone, x[row : row + 1], a, b, ranks, slots[row : row + 1])
        assert torch.equal(alone, y[row : row + 1])
    assert torch.equal(wide[:, :2], before[:, :2])
    assert torch.equal(wide[:, 2 + n_out :], before[:, 2 + n_out :])
