"""Summaries of blocks, and the blocks that KV heads choose by them: our kernels and torch against the definition."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from services.compute.backends.base import Attention
from services.compute.backends.batch import StepBatch
from services.compute.backends.cpu.attention import PagedAmx, PagedInt8, PagedKernels, PagedVectors
from services.compute.backends.cpu.ops import KernelOps
from services.compute.backends.kv_cache import KvCache
from services.compute.backends.kv_format import find_kv_format
from services.compute.backends.shapes import AttentionShape, KvShape
from services.compute.backends.torch.attention import ReferenceAttention
from services.compute.backends.torch.gathering import PagedSdpa
from services.compute.backends.torch.ops import TorchOps
from services.compute.backends.torch.pages import choose_blocks, choose_pages
from services.compute.kernels.bfloat16 import Bfloat16Kernels
from services.worker.protocol.order_codec import CopyOrder
from services.worker.rank.block_copy import BlockCopier
from tests.unit.compute.kernels.conftest import OnThreads

CPU, BLOCK, N_BLOCKS = torch.device("cpu"), 16, 60
# (rows, keys, pages): choosing decodes, decodes that fit or choose all, prompts.
WORK = ((1, 600, 9), (1, 597, 4), (1, 70, 9), (1, 300, 0), (1, 144, 9), (1, 145, 9), (20, 90, 0))


def filled(ops: TorchOps, kv_format: str, shape: AttentionShape, *, integers: bool = False) -> KvCache:
    """A cache whose blocks were written in pieces, as steps do; the same numbers for all `ops`."""
    kv_shape, generator = KvShape(BLOCK, shape.n_kv_heads, shape.head_dim), torch.Generator().manual_seed(0)
    cache = KvCache(find_kv_format(kv_format), 1, N_BLOCKS, kv_shape, ops._dtype, CPU, ops, summarised=True)
    rows = torch.randn(((N_BLOCKS + 1) * BLOCK, kv_shape.width), generator=generator)
    rows = (rows * 2).round() if integers else rows
    slots = torch.arange(BLOCK, len(rows))
    for piece in torch.split(slots, 37):
        cache.store(0, piece, rows[piece].to(ops._dtype))
    return cache


def make_batch() -> StepBatch:
    order = iter((torch.randperm(N_BLOCKS, generator=torch.Generator().manual_seed(1)) + 1).tolist() * 3)
    tables = torch.zeros(len(WORK), 40, dtype=torch.int64)
    starts = [0]
    for index, (n_rows, n_keys, _) in enumerate(WORK):
        n = -(-n_keys // BLOCK)
        tables[index, :n] = torch.tensor([next(order) for _ in range(n)])
        starts.append(starts[-1] + n_rows)
    empty = torch.zeros(starts[-1], dtype=torch.int64)
    return StepBatch(
        token_ids=empty,
        positions=empty,
        kv_slots=empty,
        query_starts=tuple(starts),
        context_lens=tuple(n_keys for _, n_keys, _ in WORK),
        block_tables=tables,
        n_decode=len(WORK) - 1,
        pages=tuple(pages for *_, pages in WORK),
    )


def attended(attention: Attention[Any], cache: KvCache, batch: StepBatch, q: torch.Tensor) -> torch.Tensor:
    return attention.attend(q, cache, 0, attention.plan(batch, BLOCK, None))


def product_to_expect(query: list[float], dimensions: list[list[float]]) -> float:
    """That of the largest one with a key; `dimensions` are the numbers of all keys."""
    middles = [(min(numbers) + max(numbers)) / 2 for numbers in dimensions]
    halves = [(max(numbers) - min(numbers)) / 2 for numbers in dimensions]
    products = sum(x * middle for x, middle in zip(query, middles, strict=True))
    return products + math.hypot(*(x * half for x, half in zip(query, halves, strict=True)))


def test_blocks_are_chosen_by_the_product_that_a_head_expects_relative_to_its_best() -> None:
    shape = AttentionShape(4, 2, 8, 1.0, None)
    cache = filled(TorchOps(torch.float32, CPU), "float32", shape)
    q, table = torch.randn(32, generator=torch.Generator().manual_seed(2)), torch.randperm(30) + 1
    keys = cache.layers[0][table][:, :, 0]  # [n, BLOCK, n_kv_heads, head_dim]
    chosen = choose_blocks(q, cache.summaries[0], table, 9, shape)
    for kv_head, heads in enumerate(q.view(2, 2, 8)):
        products = [
            [product_to_expect(head.tolist(), block.T.tolist()) for head in heads] for block in keys[1:-2, :, kv_head]
        ]
        best = [max(of_head) for of_head in zip(*products, strict=True)]
        scores = [max(product - top for product, top in zip(of_block, best, strict=True)) for of_block in products]
        first = sorted(range(27), key=lambda page: -scores[page])[:6]
        places = [0, *sorted(page + 1 for page in first), 28, 29]
        assert chosen[kv_head].tolist() == table[places].tolist()


@pytest.mark.parametrize("head_dim", [8, 24, 64, 256])
@pytest.mark.parametrize("kv_format", ["bfloat16", "int8"])
def test_summaries_and_choices_equal_those_of_torch(kernels: Bfloat16Kernels, kv_format: str, head_dim: int) -> None:
    """With integers sums are exact, and many pages tie; with others summaries alone are compared."""
    shape, batch = AttentionShape(6, 2, head_dim, 1.0, None), make_batch()
    of_torch, ours = TorchOps(torch.bfloat16, CPU), KernelOps(kernels)
    torch.testing.assert_close(
        filled(ours, kv_format, shape).summaries[0], filled(of_torch, kv_format, shape).summaries[0], rtol=0.01, atol=0
    )
    summaries = filled(of_torch, kv_format, shape, integers=True).summaries[0].round()
    q = torch.randint(-2, 3, (26, shape.n_heads * head_dim), generator=torch.Generator().manual_seed(3)).bfloat16()
    sequences = (torch.tensor(batch.query_starts), torch.tensor(batch.context_lens), batch.block_tables)
    pages = torch.tensor(batch.pages)
    _, lengths, tables = kernels.choose_pages(q, summaries, sequences, pages, BLOCK)
    _, expected_lengths, expected = choose_pages(q, summaries, sequences, pages, shape, BLOCK)
    assert lengths.tolist() == expected_lengths.tolist() == [136, 53, 70, 300, 144, 129, 90]
    for index, length in enumerate(lengths.tolist()):
        n = -(-length // BLOCK)
        assert torch.equal(tables[index, :, :n], expected[index, :, :n])


@pytest.mark.parametrize("threads", [1, 3])
def test_choices_among_hundreds_of_blocks_equal_those_of_torch(on_threads: OnThreads, threads: int) -> None:
    """Several tasks score the blocks of a sequence, and a group has more heads than are computed at once."""
    shape, generator = AttentionShape(14, 2, 40, 1.0, None), torch.Generator().manual_seed(5)
    ends = torch.randint(-3, 4, (2, 500, 2, 40), generator=generator)
    summaries = torch.stack((ends.amin(0), ends.amax(0)), dim=2).bfloat16()
    tables = torch.stack([torch.randperm(499, generator=generator)[:450] + 1 for _ in range(3)])
    q = torch.randint(-2, 3, (3, 14 * 40), generator=generator).bfloat16()
    lengths, pages = torch.tensor([450 * BLOCK, 258 * BLOCK + 1, 131 * BLOCK]), torch.tensor([100, 4, 130])
    sequences = (torch.arange(4), lengths, tables)
    _, chosen_lengths, chosen = on_threads(threads).choose_pages(q, summaries, sequences, pages, BLOCK)
    _, expected_lengths, expected = choose_pages(q, summaries, sequences, pages, shape, BLOCK)
    assert chosen_lengths.tolist() == expected_lengths.tolist()
    for index, most in enumerate(pages.tolist()):
        assert torch.equal(chosen[index, :, :most], expected[index, :, :most])
        assert not chosen[index, :, most : most + 2].any(), "attention may look up these blocks"


@pytest.mark.parametrize("kv_format", ["bfloat16", "int8"])
def test_chosen_blocks_are_attended_as_by_the_reference(kernels: Bfloat16Kernels, kv_format: str) -> None:
    shape, batch = AttentionShape(6, 2, 64, 0.125, None), make_batch()
    cache = filled(KernelOps(kernels), kv_format, shape)
    kind: type[PagedKernels] = PagedInt8 if kv_format == "int8" else PagedAmx if kernels.amx else PagedVectors
    attention, reference = kind(shape, kernels), ReferenceAttention(shape)
    q = torch.randn(26, 6 * 64, generator=torch.Generator().manual_seed(4)).bfloat16()
    actual, expected = attended(attention, cache, batch, q), attended(reference, cache, batch, q.float())
    torch.testing.assert_close(actual.float(), expected, rtol=0, atol=0.02)
    check_rows(attention, cache, batch, q, actual)


def check_rows(
    attention: Attention[Any], cache: KvCache, batch: StepBatch, q: torch.Tensor, actual: torch.Tensor
) -> None:
    """A row has the same bits alone; one that reads all of its blocks has those of a dense step."""
    dense = attended(attention, cache, replace(batch, pages=()), q)
    for index, (n_rows, n_keys, pages) in enumerate(WORK):
        rows = slice(batch.query_starts[index], batch.query_starts[index] + n_rows)
        fits = not pages or -(-n_keys // BLOCK) <= pages
        assert torch.equal(actual[rows], dense[rows]) == fits
        if n_rows == 1:
            _, alone = batch.alone([rows.start])
            assert torch.equal(attended(attention, cache, alone, q[rows].contiguous()), actual[rows])


def test_chosen_blocks_are_attended_by_gathering() -> None:
    shape, batch = AttentionShape(6, 2, 64, 0.125, None), make_batch()
    cache = filled(TorchOps(torch.float32, CPU), "float32", shape)
    q = torch.randn(26, 6 * 64, generator=torch.Generator().manual_seed(4))
    attention = PagedSdpa(shape, torch.float32, CPU)
    plan = attention.plan(batch, BLOCK, None)
    q = torch.cat((q, q.new_zeros(attention.n_rows(plan) - 26, 6 * 64)))
    actual = attention.attend(q, cache, 0, plan)[:26]
    torch.testing.assert_close(actual, attended(ReferenceAttention(shape), cache, batch, q[:26]), rtol=0, atol=1e-4)


@pytest.mark.parametrize("kv_format", ["float32", "int8"])
def test_blocks_that_arrive_are_summarised(kv_format: str) -> None:
    ops = TorchOps(torch.float32, CPU)
    source = filled(ops, kv_format, AttentionShape(6, 2, 64, 1.0, None))
    kv_shape = KvShape(BLOCK, 2, 64)
    target = KvCache(find_kv_format(kv_format), 1, N_BLOCKS, kv_shape, torch.float32, CPU, ops, summarised=True)
    staging = memoryview(bytearray(1 << 20))
    blocks = np.array([3, 7], np.int32)
    BlockCopier(source.layers, staging).copy(CopyOrder(True, blocks))
    BlockCopier(target.layers, staging, target.summarise).copy(CopyOrder(False, blocks + 1))
    assert torch.equal(target.summaries[0][[4, 8]], source.summaries[0][[3, 7]])
    assert not target.summaries[0][[3, 7]].any()
