"""The paged attention of GPUs against the definition, for drawn steps and heads."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from services.compute.backends.batch import StepBatch
from services.compute.backends.cuda.paged import SPLIT_KEYS, PagedLayout, PagedTriton, prompt_tiles
from services.compute.backends.kv_cache import KvCache
from services.compute.backends.kv_format import find_kv_format, plain_format
from services.compute.backends.shapes import AttentionShape, KvShape
from services.compute.backends.torch.attention import ReferenceAttention
from services.compute.backends.torch.ops import TorchOps

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
LIMITS = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 2e-3}
PLAIN = AttentionShape(n_heads=6, n_kv_heads=2, head_dim=32, scale=0.3, softcap=None)


@dataclass(frozen=True)
class AttentionStep:
    """Sequences as (rows, keys), decodes first, over blocks in a random order."""

    work: tuple[tuple[int, int], ...]
    block_tokens: int = 16
    window: int | None = None
    dtype: torch.dtype = torch.float32
    kv_format: str = ""

    def batch(self) -> StepBatch:
        size = self.block_tokens
        needed = [-(-n_keys // size) for _, n_keys in self.work]
        blocks = torch.randperm(sum(needed), generator=torch.Generator().manual_seed(0)) + 1
        tables = torch.full((len(self.work), max(needed) + 2), 10**9)  # behind a sequence's end nothing may be read
        for row, own in enumerate(blocks.split(needed)):
            tables[row, : len(own)] = own
        starts = [0]
        for n_rows, _ in self.work:
            starts.append(starts[-1] + n_rows)
        positions = torch.cat([torch.arange(n_keys - n_rows, n_keys) for n_rows, n_keys in self.work])
        return StepBatch(
            token_ids=torch.zeros(starts[-1], dtype=torch.int64, device=DEVICE),
            positions=positions.to(DEVICE),
            kv_slots=positions.to(DEVICE),
            query_starts=tuple(starts),
            context_lens=tuple(n_keys for _, n_keys in self.work),
            block_tables=tables.to(DEVICE),
            n_decode=sum(n_rows == 1 for n_rows, _ in self.work),
        )

    def cache(self, shape: AttentionShape, *, summarised: bool = False) -> KvCache:
        n_blocks = sum(-(-n_keys // self.block_tokens) for _, n_keys in self.work)
        kv = KvShape(self.block_tokens, shape.n_kv_heads, shape.head_dim)
        form = find_kv_format(self.kv_format) if self.kv_format else plain_format(self.dtype)
        ops = TorchOps(self.dtype, DEVICE)
        cache = KvCache(form, 1, n_blocks, kv, self.dtype, DEVICE, ops, summarised=summarised)
        slots = torch.arange(self.block_tokens, (n_blocks + 1) * self.block_tokens)
        rows = torch.randn(len(slots), kv.width, generator=torch.Generator().manual_seed(1))
        cache.store(0, slots.to(DEVICE), rows.to(DEVICE, self.dtype))
        return cache

    def queries(self, shape: AttentionShape, padding: int = 0) -> torch.Tensor:
        """Rows that lie in wider rows, as a product of Q, K and V leaves them."""
        n, width = sum(n_rows for n_rows, _ in self.work) + padding, shape.n_heads * shape.head_dim
        generator = torch.Generator().manual_seed(2)
        return torch.randn(n, width + 16, generator=generator).to(DEVICE, self.dtype)[:, :width]

    def in_tensors(self, attention: PagedTriton) -> PagedLayout:
        """The layout of a graph that has room for more decodes, tiles and keys."""
        batch = self.batch()
        lengths = F.pad(batch.device_lengths()[: batch.n_decode], (0, 2))
        tiles = F.pad(torch.from_numpy(prompt_tiles(batch, attention.tile_rows)), (0, 0, 0, 2)).to(DEVICE)
        n_keys = max(batch.context_lens) + SPLIT_KEYS
        return attention.mixed_plan(lengths, F.pad(batch.block_tables, (0, 0, 0, 2)), tiles, n_keys, self.window)

    def error(self, shape: AttentionShape) -> float:
        cache, batch, q = self.cache(shape), self.batch(), self.queries(shape, padding=3)
        attention = PagedTriton(shape, self.dtype, DEVICE, cache.kv_format.coding)
        reference = ReferenceAttention(shape)
        actual = attention.attend(q, cache, 0, attention.plan(batch, self.block_tokens, self.window))
        assert actual.shape == q.shape
        assert not actual[-3:].any(), "padding"
        laid_out = attention.attend(q, cache, 0, self.in_tensors(attention))
        assert torch.equal(laid_out, actual), "a graph's layout with room for more"
        exact = reference.attend(q[:-3].float(), cache, 0, reference.plan(batch, self.block_tokens, self.window))
        return float((actual[:-3].float() - exact).abs().max())


def shapes() -> st.SearchStrategy[AttentionShape]:
    def make(n_kv: int, group: int, head_dim: int, softcap: float | None, bias: str) -> AttentionShape:
        shape = AttentionShape(n_kv * group, n_kv, head_dim, head_dim**-0.5, softcap)
        numbers = tuple(0.1 + 0.3 * head for head in range(n_kv * group))
        return replace(shape, slopes=numbers if bias == "slopes" else (), sinks=(numbers,) if bias == "sinks" else ())

    sizes = (st.sampled_from([1, 2]), st.sampled_from([1, 3, 4]), st.sampled_from([16, 64, 80]))
    return st.builds(make, *sizes, st.sampled_from([None, 2.0]), st.sampled_from(["", "slopes", "sinks"]))


def steps() -> st.SearchStrategy[AttentionStep]:
    decodes = st.lists(st.tuples(st.just(1), st.integers(1, 70)), max_size=2)
    prompts = st.lists(st.tuples(st.integers(2, 40), st.integers(0, 50)), max_size=2)

    def make(decodes: list[tuple[int, int]], prompts: list[tuple[int, int]], **fields: object) -> AttentionStep:
        work = (*decodes, *((n_rows, cached + n_rows) for n_rows, cached in prompts)) or ((1, 1),)
        return AttentionStep(work, **fields)  # type: ignore[arg-type]

    windows = st.one_of(st.none(), st.integers(1, 60))
    fields = {"window": windows, "dtype": st.sampled_from([*LIMITS]), "kv_format": st.sampled_from(["", "int8", "fp8"])}
    return st.builds(make, decodes, prompts, block_tokens=st.sampled_from([16, 48]), **fields)


LONG = ((1, 2 * SPLIT_KEYS + 30), (1, SPLIT_KEYS), (1, 5))
SUNK = replace(PLAIN, n_heads=4, sinks=((0.5, 1.5) * 2,))


@settings(max_examples=6)
@given(step=steps(), shape=shapes())
@example(step=AttentionStep(LONG, window=SPLIT_KEYS + 3, dtype=torch.bfloat16), shape=SUNK)
@example(step=AttentionStep(((1, 40), (150, 190)), window=70), shape=AttentionShape(1, 1, 256, 0.1, 5.0))
@example(step=AttentionStep((*LONG, (20, 90)), dtype=torch.bfloat16, kv_format="int8"), shape=PLAIN)
@example(step=AttentionStep((*LONG, (20, 90)), kv_format="fp8", window=300), shape=replace(PLAIN, head_dim=80))
def test_every_step_matches_the_definition_of_attention(step: AttentionStep, shape: AttentionShape) -> None:
    assert step.error(shape) <= LIMITS[step.dtype] * (
        2 if step.kv_format else 1
    )  # scales are factors of rounded weights


def test_row_is_the_same_alone_beside_longer_rows_and_in_a_graph() -> None:
    shape, step = replace(PLAIN, n_heads=2, n_kv_heads=1), AttentionStep(((1, SPLIT_KEYS + 9), (1, 3 * SPLIT_KEYS)))
    cache, batch, q = step.cache(shape), step.batch(), step.queries(shape)
    attention = PagedTriton(shape, step.dtype, DEVICE)
    both = attention.attend(q, cache, 0, attention.plan(batch, 16, None))
    lengths = torch.tensor(batch.context_lens, device=DEVICE)
    for n_keys in (2 * SPLIT_KEYS, 8 * SPLIT_KEYS):
        plan = attention.decode_plan(lengths[:1], batch.block_tables[:1], n_keys, 16, None)
        assert torch.equal(attention.attend(q[:1], cache, 0, plan), both[:1])


def test_heads_that_are_too_large_are_refused() -> None:
    with pytest.raises(ValueError, match="larger than 256"):
        PagedTriton(replace(PLAIN, head_dim=576), torch.bfloat16, DEVICE)
