"""A cache of 8-bit codes that GPUs write is the one that the format writes, byte by byte."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from services.compute.backends.cuda.fused import TritonOps
from services.compute.backends.cuda.kv_codes import CodeWriter
from services.compute.backends.kv_cache import KvCache, KvLayer
from services.compute.backends.kv_format import Coding, KvFormat, find_kv_format
from services.compute.backends.shapes import KvShape
from services.compute.backends.torch.ops import TorchOps
from tests.triton.test_attention import DEVICE
from tests.triton.test_layer import DTYPES, close, numbers

FORMATS = st.sampled_from(["int8", "fp8"])
SLOTS = [70, 18, 33, 48]


def coding_of(name: str) -> Coding:
    coding = find_kv_format(name).coding
    assert coding is not None
    return coding


def caches(form: KvFormat, shape: KvShape, dtype: torch.dtype, n_tokens: int = 100) -> tuple[KvCache, KvCache]:
    """Ours and the reference's."""
    kinds = (TritonOps(dtype, DEVICE), TorchOps(dtype, DEVICE))
    n_blocks = n_tokens // shape.block_tokens
    ours, reference = (KvCache(form, 1, n_blocks, shape, dtype, DEVICE, ops) for ops in kinds)
    return ours, reference


@settings(max_examples=25)
@given(
    name=FORMATS,
    n=st.integers(1, 4),
    heads=st.tuples(st.integers(1, 3), st.integers(1, 2)),
    head_dim=st.sampled_from([16, 24, 32, 80, 128]),
    half=st.sampled_from([4, 8, 12]),
    block_tokens=st.sampled_from([16, 48]),
    padding=st.integers(0, 1),
    sizes=st.sampled_from([0, 4, 20]),
    dtype=DTYPES,
)
@example("fp8", 4, (2, 1), 128, 64, 16, 1, 20, torch.bfloat16)
@example("int8", 4, (2, 1), 32, 16, 16, 0, 20, torch.float32)
def test_heads_are_rotated_coded_and_cached(
    name: str,
    n: int,
    heads: tuple[int, int],
    head_dim: int,
    half: int,
    block_tokens: int,
    padding: int,
    sizes: int,
    dtype: torch.dtype,
) -> None:
    """Rows of Q, K and V side by side, of numbers of all sizes; only the first `n` have a place in the cache."""
    (n_q, n_kv), rows, half = heads, n + padding, min(half, head_dim // 2)
    shape = KvShape(block_tokens, n_kv, head_dim)
    ours, reference = caches(find_kv_format(name), shape, dtype)
    given_rows = numbers(rows, (n_q + 2 * n_kv) * head_dim)
    qkv = (given_rows * torch.exp2(-sizes * numbers(*given_rows.shape, seed=1).abs())).to(dtype)
    before, slots = qkv.clone(), torch.tensor(SLOTS, device=DEVICE)[:n]
    angles, positions = numbers(20, half, seed=2), torch.arange(rows, device=DEVICE) * 3
    ours.store(0, slots, qkv, TritonOps(dtype, DEVICE).rope(angles.cos(), angles.sin())(positions))
    reference.store(0, slots, qkv[:n, -shape.width :])  # the keys as they were rotated in place
    assert torch.equal(ours.layers[0], reference.layers[0])
    exact = before.float()
    TorchOps(torch.float32, DEVICE).rope(angles.cos(), angles.sin())(positions)(
        exact.view(rows, -1, head_dim)[:, : n_q + n_kv]
    )
    assert close(qkv, exact)


@settings(max_examples=10)
@given(name=FORMATS, n=st.integers(0, 4), head_dim=st.sampled_from([16, 80]), dtype=DTYPES)
def test_unrotated_heads_are_coded_in_place(name: str, n: int, head_dim: int, dtype: torch.dtype) -> None:
    shape = KvShape(16, 2, head_dim)
    ours, reference = caches(find_kv_format(name), shape, dtype)
    rows, slots = numbers(4, 8 + shape.width).to(dtype)[:n, 8:], torch.tensor(SLOTS, device=DEVICE)[:n]
    for cache in (ours, reference):
        cache.store(0, slots, rows)
    assert torch.equal(ours.layers[0], reference.layers[0])


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_every_code_and_every_tie_between_two_is_rounded_as_the_format_rounds(name: str) -> None:
    """A head whose largest number is the largest code has the scale 1, so its numbers are rounded as they are."""
    coding, shape = coding_of(name), KvShape(16, 1, 1024)
    codes = torch.arange(256, dtype=torch.uint8).view(coding.codes).float()
    codes = codes[codes.abs() <= coding.largest].sort().values
    ties = (codes[1:] + codes[:-1]) / 2
    every = torch.cat([codes, ties, ties.nextafter(codes[1:]), ties.nextafter(codes[:-1])])
    values = torch.nn.functional.pad(every, (0, 1024 - len(every)))
    ours, reference = caches(find_kv_format(name), shape, torch.float32)
    rows = torch.cat([torch.zeros(1024), values]).unsqueeze(0).to(DEVICE)
    for cache in (ours, reference):
        cache.store(0, torch.tensor([20], device=DEVICE), rows)
    assert torch.equal(ours.layers[0], reference.layers[0])
    assert torch.equal(ours.gather(0, torch.tensor([20], device=DEVICE))[0, 1024 : 1024 + len(codes)].cpu(), codes)


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_scales_between_two_are_rounded_to_even(name: str) -> None:
    coding, shape = coding_of(name), KvShape(16, 1, 16)
    ties = (torch.arange(0x3F80, 0x4180) << 16 | 0x8000).int().view(torch.float32)
    largest = ties * coding.largest
    between = (largest * (1 / coding.largest)).view(torch.int32) & 0xFFFF == 0x8000
    rows = torch.zeros(int(between.sum()), 32, device=DEVICE)
    assert len(rows) > 50
    rows[:, 20] = largest[between].to(DEVICE)
    ours, reference = caches(find_kv_format(name), shape, torch.float32, len(rows))
    for cache in (ours, reference):
        cache.store(0, torch.arange(len(rows), device=DEVICE), rows)
    assert torch.equal(ours.layers[0], reference.layers[0])


@pytest.mark.parametrize("name", ["int8", "fp8"])
@pytest.mark.parametrize("number", [0.0, -0.0, 1e-38, 1e-42, 3e38, torch.inf, -torch.inf, torch.nan])
def test_heads_of_extreme_numbers(name: str, number: float) -> None:
    shape = KvShape(16, 1, 16)
    ours, reference = caches(find_kv_format(name), shape, torch.float32)
    rows = torch.zeros(2, 32, device=DEVICE)
    rows[0, 16:] = rows[1, 20] = number
    slots = torch.tensor([20, 21], device=DEVICE)
    for cache in (ours, reference):
        cache.store(0, slots, rows)
    actual, exact = ours.gather(0, slots), reference.gather(0, slots)
    assert torch.equal(actual.isnan(), exact.isnan())
    assert torch.equal(actual.nan_to_num(), exact.nan_to_num())
    assert torch.equal(ours.layers[0][1, :, : 16 * 16], reference.layers[0][1, :, : 16 * 16]), "codes"


def test_writer_with_different_codes_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    ops, launched = TritonOps(torch.bfloat16, DEVICE), []

    def spoil(self: CodeWriter, coding: Coding, layer: torch.Tensor, *_: object) -> None:
        launched.append(coding)
        layer.fill_(1)

    def written() -> torch.Tensor:
        layer = form.allocate(2, shape, DEVICE)
        ops.store(KvLayer(form, shape, layer), torch.tensor([3], device=DEVICE), torch.ones(1, 32, device=DEVICE))
        return layer

    form, shape = find_kv_format("int8"), KvShape(16, 1, 16)
    monkeypatch.setattr(CodeWriter, "store", spoil)
    assert written().all(), "ours"
    assert ops.disagreement() is None
    launched.clear()
    assert not written().all()
    assert not launched
