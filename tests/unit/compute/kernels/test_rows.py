"""Operations on each row by itself: norms, sums, rotations, gates, the cache."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from services.compute.kernels.bfloat16 import Bfloat16Kernels
from tests.unit.compute.kernels.numbers import FLOAT32, assert_rounded, normal

# Up to four pieces of 32 rows, which the threads share.
N, SIZE = st.integers(1, 100), st.integers(1, 200)


@given(n=N, size=SIZE, groups=st.integers(0, 5), eps=st.sampled_from([1e-6, 1e-5, 0.3]), seed=st.integers(0, 99))
def test_rms_norm(kernels: Bfloat16Kernels, n: int, size: int, groups: int, eps: float, seed: int) -> None:
    """`groups` 0: one norm over the row; else heads in the middle of a wider row, each with its own weight."""
    if groups:
        x = normal(seed, n, groups * size + 7)[:, 3 : 3 + groups * size].view(n, groups, size)
        weight = normal(seed + 1, groups, size).float()
    else:
        x, weight = normal(seed, n, size), normal(seed + 1, size).float()
    out = torch.full(x.shape, torch.nan, dtype=torch.bfloat16)
    kernels.rms_norm(x, weight, eps, out)
    wide = x.double()
    assert_rounded(out, wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double(), 1e-6)
    again = torch.empty_like(out[-1:])
    kernels.rms_norm(x[-1:], weight, eps, again)
    assert torch.equal(again, out[-1:])


@given(n=N, size=SIZE, scale=st.sampled_from([1.0, 0.22, -3.0]), seed=st.integers(0, 99))
def test_add(kernels: Bfloat16Kernels, n: int, size: int, scale: float, seed: int) -> None:
    x, added = normal(seed, n + 1, size), normal(seed + 1, n, size)
    exact, beyond = x[:n].double() + added.double() * torch.tensor(scale).double(), x[n].clone()
    kernels.add_(x[:n], added, scale)
    assert_rounded(x[:n], exact)
    assert torch.equal(x[n], beyond)


@given(data=st.data(), n=N, heads=st.integers(1, 5), head_dim=st.integers(2, 256), seed=st.integers(0, 99))
def test_rotate(kernels: Bfloat16Kernels, data: st.DataObject, n: int, heads: int, head_dim: int, seed: int) -> None:
    half = data.draw(st.integers(1, head_dim // 2))
    positions = torch.randint(0, 300, (n,), generator=torch.Generator().manual_seed(seed))
    angles = torch.arange(300).unsqueeze(1) * torch.logspace(0, -4, half)
    cos, sin = angles.cos() * 1.1, angles.sin() * 1.1
    row = normal(seed, n, heads * head_dim + 32)
    before = row.clone()
    x = row[:, : heads * head_dim].view(n, heads, head_dim)
    a, b = x[..., :half].double(), x[..., half : 2 * half].double()
    c, s = (table[positions].unsqueeze(1).double() for table in (cos, sin))
    kernels.rotate_(x, cos, sin, positions)
    assert_rounded(x[..., :half], a * c - b * s, ((a * c).abs() + (b * s).abs()) * FLOAT32)
    assert_rounded(x[..., half : 2 * half], b * c + a * s, ((b * c).abs() + (a * s).abs()) * FLOAT32)
    old = before[:, : heads * head_dim].view(n, heads, head_dim)
    assert torch.equal(x[..., 2 * half :], old[..., 2 * half :])
    assert torch.equal(row[:, heads * head_dim :], before[:, heads * head_dim :])


@given(n=N, size=SIZE, seed=st.integers(0, 99))
def test_write_rows(kernels: Bfloat16Kernels, n: int, size: int, seed: int) -> None:
    cache, rows = normal(seed, 128, size), normal(seed + 1, n, size + 5)[:, 5:]
    slots = torch.randperm(128, generator=torch.Generator().manual_seed(seed))[:n]
    expected = cache.index_copy(0, slots, rows)
    kernels.write_rows(cache, slots, rows)
    assert torch.equal(cache, expected)


@given(n=N, size=SIZE, tanh=st.booleans(), scale=st.sampled_from([0.01, 1.0, 40.0]), seed=st.integers(0, 99))
def test_gate(kernels: Bfloat16Kernels, n: int, size: int, tanh: bool, scale: float, seed: int) -> None:
    x, out = normal(seed, n, 2 * size, scale=scale), torch.full((n + 1, size), torch.nan, dtype=torch.bfloat16)
    kernels.gate(x, out[:n], tanh=tanh)
    gate, up = x.double().chunk(2, -1)
    u = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    # x (1 + tanh(u)) / 2 as x sigmoid(2u): the sum would lose everything where tanh is close to -1.
    exact = gate * torch.sigmoid(2 * u if tanh else gate) * up
    # sigmoid is e^-|z| there, as exact as z in float32
    assert_rounded(out[:n], exact, exact.abs() * FLOAT32 * 200 + 1e-34)
    assert out[n].isnan().all()


def test_gates_of_extreme_values(kernels: Bfloat16Kernels) -> None:
    gate = torch.tensor([0.0, -0.0, 1e-30, -1e-30, 200.0, -200.0, 3e38, -3e38], dtype=torch.bfloat16)
    for tanh in (False, True):
        out = torch.empty(1, 8, dtype=torch.bfloat16)
        kernels.gate(torch.cat((gate, torch.ones(8, dtype=torch.bfloat16))).view(1, 16), out, tanh=tanh)
        expected = torch.tensor([0.0, 0.0, 5e-31, -5e-31, 200.0, 0.0, 3e38, 0.0], dtype=torch.bfloat16)
        assert torch.equal(out[0], expected), out
