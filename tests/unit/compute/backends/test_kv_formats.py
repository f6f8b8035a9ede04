"""Every format of the KV cache reads what was written, here and on other workers, and takes the bytes that it says."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from services.compute.backends import kv_formats
from services.compute.backends.choice import check_attention
from services.compute.backends.kv_cache import KvCache
from services.compute.backends.kv_format import find_kv_format
from services.compute.backends.kv_formats import NAMES
from services.compute.backends.opening import open_backend
from services.compute.backends.shapes import AttentionShape, KvShape
from services.compute.backends.torch.gathering import PagedSdpa
from services.worker.protocol.order_codec import CopyOrder
from services.worker.rank.block_copy import BlockCopier

CPU = torch.device("cpu")
SHAPE = KvShape(block_tokens=16, n_kv_heads=2, head_dim=32)
N_LAYERS, N_BLOCKS = 3, 4
PRECISION = {"fp8": 2**-4}  # error relative to the largest number of the row; other formats: 2e-2

pytestmark = pytest.mark.parametrize("name", NAMES)
computed_in = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def cache_of(name: str, dtype: torch.dtype) -> KvCache:
    return KvCache(find_kv_format(name), N_LAYERS, N_BLOCKS, SHAPE, dtype, CPU, open_backend(dtype, CPU).ops)


def rows_of(n: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(n, SHAPE.width, generator=torch.Generator().manual_seed(n)).to(dtype)


@computed_in
def test_written_rows_are_read_back_and_other_rows_are_unchanged(name: str, dtype: torch.dtype) -> None:
    cache, everything = cache_of(name, dtype), torch.arange((N_BLOCKS + 1) * SHAPE.block_tokens)
    assert not cache.gather(1, everything).any()
    slots, rows = torch.tensor([70, 16, 33]), rows_of(3, dtype)
    cache.store(1, slots, rows)
    actual = cache.gather(1, slots)
    assert actual.dtype is dtype
    assert ((actual - rows).abs().amax(-1) <= PRECISION.get(name, 2e-2) * rows.abs().amax(-1)).all()
    out = torch.full_like(rows, torch.nan)
    assert cache.gather(1, slots, out).data_ptr() == out.data_ptr()
    assert torch.equal(out, actual)
    others = everything[~torch.isin(everything, slots)]
    assert not cache.gather(1, others).any()
    assert not cache.gather(0, everything).any()


@computed_in
def test_a_device_stores_rotated_keys_as_the_format_defines(name: str, dtype: torch.dtype) -> None:
    """Rows of Q, K and V; the last row has no position."""
    cache, kv_format, ops = cache_of(name, dtype), find_kv_format(name), open_backend(dtype, CPU).ops
    qkv = torch.randn(4, 3 * 32 + SHAPE.width, generator=torch.Generator().manual_seed(0)).to(dtype)
    slots, angles = torch.tensor([70, 16, 33]), torch.arange(48, dtype=torch.float32).view(4, 12)
    rotation, rotated = ops.rope(angles.cos(), angles.sin())(torch.arange(4)), qkv.clone()
    rotation(rotated.view(4, -1, 32)[:, :5])
    cache.store(1, slots, qkv, rotation)
    assert torch.equal(qkv[:, : 3 * 32], rotated[:, : 3 * 32]), "queries"
    defined = kv_format.allocate(N_BLOCKS + 1, SHAPE, CPU)
    kv_format.write(defined, SHAPE, slots, rotated[:3, -SHAPE.width :])
    assert torch.equal(cache.layers[1], defined)


def test_a_token_takes_the_bytes_that_are_promised(name: str) -> None:
    cache = cache_of(name, torch.bfloat16)
    token = kv_formats.token_bytes(name, SHAPE.n_kv_heads, SHAPE.head_dim)
    for layer in cache.layers:
        assert (layer.is_contiguous(), len(layer)) == (True, N_BLOCKS + 1)
        assert layer.nbytes == (N_BLOCKS + 1) * SHAPE.block_tokens * token


def test_blocks_that_another_worker_gets_read_the_same(name: str) -> None:
    here, there = cache_of(name, torch.bfloat16), cache_of(name, torch.bfloat16)
    slots = torch.arange(SHAPE.block_tokens, (N_BLOCKS + 1) * SHAPE.block_tokens)
    for layer in range(N_LAYERS):
        here.store(layer, slots, rows_of(len(slots), torch.bfloat16))
    staging = memoryview(bytearray(here.layers[0][0].nbytes * N_LAYERS * 2))
    for cache, blocks, out in ((here, [2, 4], True), (there, [3, 1], False)):
        BlockCopier(cache.layers, staging).copy(CopyOrder(out, np.array(blocks)))
    for layer in range(N_LAYERS):
        for copied, made in ((2, 3), (4, 1)):
            positions = torch.arange(SHAPE.block_tokens)
            sent = here.gather(layer, copied * SHAPE.block_tokens + positions)
            assert torch.equal(there.gather(layer, made * SHAPE.block_tokens + positions), sent)


@computed_in
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_a_backend_attends_over_every_kv_format(name: str, dtype: torch.dtype, softcap: float | None) -> None:
    kv_format, shape = find_kv_format(name), AttentionShape(6, 2, 32, 0.2, softcap)
    attention = open_backend(dtype, CPU, kv_format).attention(shape)
    assert check_attention(attention, shape, dtype, CPU, kv_format) is None
    if name == "int8":  # which GPUs and other heads gather
        assert check_attention(PagedSdpa(shape, dtype, CPU), shape, dtype, CPU, kv_format) is None


@pytest.mark.parametrize("head_dim", [64, 128])
def test_eight_bits_take_at_least_45_percent_less_than_bfloat16(name: str, head_dim: int) -> None:
    if name in ("int8", "fp8"):
        eight_bits, plain = (kv_formats.token_bytes(kv_format, 2, head_dim) for kv_format in (name, "bfloat16"))
        assert eight_bits <= 0.55 * plain
