"""Scans over states: sums of one order, whichever way a sequence is cut and whatever others a step holds."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.compute.backends.states import ScanTokens, StatePlan, StateRows
from services.compute.backends.torch.scans import scan
from services.compute.kernels.bfloat16 import Bfloat16Kernels

CPU = torch.device("cpu")


def tokens(seed: int, n: int, sizes: tuple[int, int, int], *, delta: bool, own: bool) -> ScanTokens:
    """Random tokens for heads of `sizes` n_heads, height and width; `own`: each column of a state has its decay."""
    n_heads, height, width = sizes
    draw = torch.Generator().manual_seed(seed)
    b, c = (torch.randn(n, n_heads, width, generator=draw) / width**0.5 for _ in range(2))
    rate = torch.rand(n, n_heads, generator=draw)
    decay = torch.rand(n, n_heads, *([width] * own), generator=draw)
    return ScanTokens(torch.randn(n, n_heads, height, generator=draw), b, c, decay, rate if delta else None)


def computed(kernels: Bfloat16Kernels, states: torch.Tensor, row: int, part: ScanTokens) -> torch.Tensor:
    out = torch.empty_like(part.inputs)
    kernels.scan_(states, torch.tensor([row]), (part.inputs, part.b, part.c, part.decay), part.rate, out)
    return out


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("delta", [False, True])
@given(
    n=st.integers(1, 9),
    sizes=st.tuples(st.integers(1, 5), st.integers(1, 20), st.integers(1, 70)),
    seed=st.integers(0, 99),
)
def test_scan(kernels: Bfloat16Kernels, delta: bool, own: bool, n: int, sizes: tuple[int, int, int], seed: int) -> None:
    part = tokens(seed, n, sizes, delta=delta, own=own)
    before = torch.randn(3, *sizes, generator=torch.Generator().manual_seed(seed + 1))
    states, exact = before.clone(), before.double()
    out = computed(kernels, states, 1, part)
    wide = [None if each is None else each.double() for each in (part.inputs, part.b, part.c, part.decay, part.rate)]
    expected = scan(ScanTokens(*wide), exact, StatePlan.of([StateRows(0, n, 1)], CPU))  # type: ignore[arg-type]
    assert (out - expected).abs().max() <= 1e-4
    assert (states - exact).abs().max() <= 1e-4
    assert torch.equal(states[[0, 2]], before[[0, 2]])


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("delta", [False, True])
@given(cut=st.integers(1, 8), sizes=st.tuples(st.integers(1, 5), st.integers(1, 20), st.integers(1, 70)))
def test_scan_is_the_same_in_pieces_and_beside_another_sequence(
    kernels: Bfloat16Kernels, delta: bool, own: bool, cut: int, sizes: tuple[int, int, int]
) -> None:
    part, other = (tokens(seed, 9, sizes, delta=delta, own=own) for seed in (1, 2))
    whole = torch.zeros(4, *sizes)
    expected = computed(kernels, whole, 0, part)
    pieces = torch.zeros(4, *sizes)
    outputs = [computed(kernels, pieces, 0, part.part(0, cut)), computed(kernels, pieces, 0, part.part(cut, 9))]
    assert torch.equal(torch.cat(outputs), expected)
    assert torch.equal(pieces[0], whole[0])
    both = [torch.cat(pair) for pair in zip(list_of(part), list_of(other), strict=True)]
    together, out = torch.zeros(4, *sizes), torch.empty(18, *sizes[:2])
    rate = torch.cat((part.rate, other.rate)) if part.rate is not None and other.rate is not None else None
    kernels.scan_(together, torch.tensor([2, 0]), (both[0], both[1], both[2], both[3]), rate, out)
    assert torch.equal(out[:9], expected)
    assert torch.equal(together[2], whole[0])


def list_of(part: ScanTokens) -> list[torch.Tensor]:
    return [part.inputs, part.b, part.c, part.decay]
