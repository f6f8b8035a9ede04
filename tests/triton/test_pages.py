"""Summaries of blocks, and the choice of a decode's blocks, are those of torch."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from services.compute.backends.choice import check_attention
from services.compute.backends.cuda import paged
from services.compute.backends.cuda.fused import TritonOps
from services.compute.backends.cuda.paged import PagedTriton
from services.compute.backends.kv_cache import KvLayer
from services.compute.backends.kv_format import find_kv_format
from services.compute.backends.shapes import KvShape
from services.compute.backends.torch.attention import ReferenceAttention
from tests.triton.test_attention import DEVICE, LIMITS, PLAIN, AttentionStep

BLOCK = 16
# (rows, keys) and pages: decodes that choose, one that fits, one that reads all, and a prompt.
WORK, PAGES = ((1, 170), (1, 85), (1, 64), (1, 40), (20, 50)), (6, 4, 4, 0, 0)


@pytest.mark.parametrize(
    ("dtype", "kv_format", "head_dim"),
    [(torch.float32, "", 32), (torch.bfloat16, "", 64), (torch.bfloat16, "int8", 80), (torch.float32, "fp8", 16)],
)
def test_chosen_blocks_are_those_of_the_reference(dtype: torch.dtype, kv_format: str, head_dim: int) -> None:
    """A row that reads all of its blocks has the bits of a dense step; a row has the same bits alone."""
    shape, step = replace(PLAIN, head_dim=head_dim), AttentionStep(WORK, dtype=dtype, kv_format=kv_format)
    cache, reference = step.cache(shape, summarised=True), ReferenceAttention(shape)
    (expected,), (data,) = cache.summaries, cache.layers
    layer = KvLayer(cache.kv_format, KvShape(BLOCK, shape.n_kv_heads, head_dim), data)
    slots = torch.arange(BLOCK, (cache.n_blocks + 1) * BLOCK, BLOCK // 2, device=DEVICE) + BLOCK // 2 - 1
    cache.summaries = [torch.zeros_like(expected)]
    TritonOps(dtype, DEVICE).summarise(layer, slots, cache.summaries[0])
    torch.testing.assert_close(cache.summaries[0], expected, rtol=0.01, atol=0)  # the interpreter cuts to bfloat16
    batch, q = replace(step.batch(), pages=PAGES), step.queries(shape)
    attention = PagedTriton(shape, dtype, DEVICE, cache.kv_format.coding)
    actual = attention.attend(q, cache, 0, attention.plan(batch, BLOCK, None))
    exact = reference.attend(q.float(), cache, 0, reference.plan(batch, BLOCK, None))
    assert (actual.float() - exact).abs().max() <= LIMITS[dtype] * (2 if kv_format else 1)
    dense = attention.attend(q, cache, 0, attention.plan(replace(batch, pages=()), BLOCK, None))
    same = [torch.equal(*rows) for rows in zip(actual, dense, strict=True)]
    assert same == [False, False, *[True] * (len(q) - 2)]
    _, alone = batch.alone([1])
    assert torch.equal(attention.attend(q[1:2], cache, 0, attention.plan(alone, BLOCK, None))[0], actual[1])


def test_attention_that_chooses_other_blocks_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    kv_format = find_kv_format("float32")
    attention = PagedTriton(PLAIN, torch.float32, DEVICE)
    check = partial(check_attention, attention, PLAIN, torch.float32, DEVICE, kv_format, chooses=True)
    assert check() is None
    monkeypatch.setattr(paged, "LAST", 3)
    assert "pages (0, 4, 9, 0, 0): differs from the reference" in (check() or "")
