"""Scans over states: sums of one order, whichever way a sequence is cut and whatever others a step holds."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.compute.backends.base import Ops
from services.compute.backends.cpu.ops import KernelOps
from services.compute.backends.names import Gate, GateCurve
from services.compute.backends.recurrent import ChannelDecays, DeltaDecays, HeadDecays
from services.compute.backends.states import ScanTokens, StatePlan, StateRows
from services.compute.backends.torch.ops import TorchOps
from services.compute.backends.torch.scans import scan
from services.compute.kernels.bfloat16 import Bfloat16Kernels
from tests.unit.compute.kernels.numbers import normal

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


Compute = Callable[[Ops, torch.Tensor, torch.Tensor, StatePlan], torch.Tensor]
Case = tuple[Compute, int, tuple[int, ...], torch.dtype]
N, STORE = 9, 5  # rows of the input of a test, rows of its store of states
_MIXED = [StateRows(0, 1, row=3, save=1), StateRows(1, 7, row=4, save=2), StateRows(7, N, row=0)]


def convolution(n_channels: int, kernel: int, *, gated: bool, biased: bool) -> Case:
    """A computation, the numbers of its rows, the shape of its state, and its dtype."""
    weight = normal(1, n_channels, kernel, scale=0.5, dtype=torch.float32)
    bias = normal(2, n_channels, dtype=torch.float32) if biased else None

    def compute(ops: Ops, x: torch.Tensor, state: torch.Tensor, plan: StatePlan) -> torch.Tensor:
        conv = ops.convolution(weight, bias)
        return (conv.gated if gated else conv.activated)(x, state, plan)

    return compute, n_channels * (3 if gated else 1), (kernel - 1, n_channels), torch.bfloat16


def state_space(n_heads: int, head_dim: int, n_groups: int, n_states: int) -> Case:
    """The same of a scan."""
    rate, step_bias, skip = (normal(seed, n_heads, dtype=torch.float32) for seed in (1, 2, 3))
    decays = HeadDecays(-rate.exp(), step_bias, skip, 0.05, head_dim, n_groups, n_states)
    sizes = [n_heads * head_dim, n_groups * n_states, n_groups * n_states, n_heads]

    def compute(ops: Ops, x: torch.Tensor, state: torch.Tensor, plan: StatePlan) -> torch.Tensor:
        inputs, b, c, dt = torch.split(x, sizes, dim=1)
        return ops.state_space(decays)(inputs, b, c, 10 * dt, state, plan)

    return compute, sum(sizes), (n_heads, head_dim, n_states), torch.float32


def channel_space(n_channels: int, n_states: int) -> Case:
    """The same of a scan of channels."""
    rates = -normal(1, n_channels, n_states, dtype=torch.float32).exp()
    step_bias, skip = (normal(seed, n_channels, dtype=torch.float32) for seed in (2, 3))
    sizes = [n_channels, n_states, n_states, n_channels]

    def compute(ops: Ops, x: torch.Tensor, state: torch.Tensor, plan: StatePlan) -> torch.Tensor:
        inputs, b, c, dt = torch.split(x, sizes, dim=1)
        return ops.state_space(ChannelDecays(rates, step_bias, skip))(inputs, b, c, 10 * dt, state, plan)

    return compute, sum(sizes), (n_channels, n_states), torch.float32


def delta_rule(n_key_heads: int, group: int, key_dim: int, value_dim: int) -> Case:
    """The same of a gated delta rule."""
    n_heads = n_key_heads * group
    rate, step_bias = (normal(seed, n_heads, dtype=torch.float32) for seed in (1, 2))
    decays = DeltaDecays(-rate.exp(), step_bias, n_key_heads, key_dim, value_dim)
    sizes = [2 * n_key_heads * key_dim + n_heads * value_dim, n_heads, n_heads]

    def compute(ops: Ops, x: torch.Tensor, state: torch.Tensor, plan: StatePlan) -> torch.Tensor:
        mixed, dt, corrected = torch.split(x, sizes, dim=1)
        return ops.delta_rule(decays)(mixed, dt, corrected, state, plan)

    return compute, sum(sizes), (n_heads, value_dim, key_dim), torch.float32


RECURRENT = {
    "gated_convolution": convolution(40, 3, gated=True, biased=False),
    "biased_convolution": convolution(77, 4, gated=True, biased=True),
    "activated_convolution": convolution(5000, 4, gated=False, biased=True),
    "short_convolution": convolution(16, 2, gated=False, biased=False),
    "state_space": state_space(6, 20, 2, 24),
    "one_group": state_space(5, 32, 1, 70),
    "channels": channel_space(300, 16),
    "few_channels": channel_space(7, 20),
    "delta_rule": delta_rule(2, 3, 32, 40),
    "short_keys": delta_rule(3, 1, 10, 7),
}


@pytest.mark.parametrize("name", RECURRENT)
def test_states_are_advanced_as_torch_does(kernels: Bfloat16Kernels, name: str) -> None:
    compute, width, shape, dtype = RECURRENT[name]
    x, plan = normal(0, N, width), StatePlan.of(_MIXED, CPU)
    store = normal(1, STORE, *shape, dtype=dtype)
    ours, torchs = store.clone(), store.clone()
    actual = compute(KernelOps(kernels), x, ours, plan)
    expected = compute(TorchOps(torch.bfloat16, CPU), x, torchs, plan)
    torch.testing.assert_close(actual, expected, rtol=2**-6, atol=2**-6)
    torch.testing.assert_close(ours, torchs, rtol=1e-4, atol=1e-4)
    assert torch.equal(ours[[1, 2]], ours[[3, 4]])


@pytest.mark.parametrize("name", RECURRENT)
def test_rows_of_states_have_the_same_bits_in_pieces_and_beside_another_sequence(
    kernels: Bfloat16Kernels, name: str
) -> None:
    compute, width, shape, dtype = RECURRENT[name]
    ops, x, other = KernelOps(kernels), normal(0, N, width), normal(1, N, width)
    whole, alone = torch.zeros(STORE, *shape, dtype=dtype), torch.zeros(STORE, *shape, dtype=dtype)
    expected = compute(ops, x, whole, StatePlan.of([StateRows(0, N, row=0)], CPU))
    for row in range(N):
        both = torch.cat((other[row : row + 1], x[row : row + 1]))
        plan = StatePlan.of([StateRows(0, 1, row=2), StateRows(1, 2, row=4)], CPU)
        assert torch.equal(compute(ops, both, alone, plan)[1], expected[row])
    assert torch.equal(alone[4], whole[0])


@pytest.mark.parametrize("curve", ["silu", "sigmoid"])
@pytest.mark.parametrize("gate", ["inside", "outside", "plain"])
@given(n=st.integers(1, 40), size=st.integers(1, 70), groups=st.integers(1, 4))
def test_gated_norm(kernels: Bfloat16Kernels, gate: Gate, curve: GateCurve, n: int, size: int, groups: int) -> None:
    weight = None if gate == "plain" else normal(1, groups * size, dtype=torch.float32)
    y, z = normal(2, n, groups * size), normal(3, n, 2 * groups * size + 3)[:, 3 : 3 + groups * size]
    actual, expected = (
        ops.gated_norm(weight, groups, 1e-5, gate, curve)(y, z)
        for ops in (KernelOps(kernels), TorchOps(torch.bfloat16, CPU))
    )
    torch.testing.assert_close(actual, expected, rtol=2**-7, atol=1e-6)
