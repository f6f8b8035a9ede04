"""Texts of models with a state outside the KV cache are those of transformers, however they are computed."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
import transformers

from tests.integration.worker_engine.answers import ask, complete
from tests.integration.worker_engine.forked_engine import forked
from tests.unit.compute.model.zoo import N_PIECES, write_with_tokenizer

N_TOKENS = 12
LENGTHS = (5, 40, 61, 16, 17)  # one ends a block of 16 tokens, one begins the next


def continuation(model: transformers.PreTrainedModel, ids: list[int]) -> list[int]:
    """Return the greedy continuation by the whole text, without a cache."""
    known = list(ids)
    with torch.inference_mode():
        for _ in range(N_TOKENS):
            known.append(int(model(torch.tensor([known]), use_cache=False).logits[0, -1].argmax()))
    return known[len(ids) :]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("variant", "ranks"),
    [  # each kind of layer with a state, one next to attention, and a model without attention
        *[("lfm2", 1), ("zamba2", 2), ("qwen3_5", 1), ("minimax", 1)],
        *[("jamba", 2), ("kimi_linear", 1), ("falcon_h1", 2), ("mamba2", 1)],
    ],
)
async def test_texts_equal_transformers_in_chunks_after_preemptions_and_from_snapshots(
    variant: str, ranks: int, tmp_path: Path
) -> None:
    model = write_with_tokenizer(variant, tmp_path)
    prompts = [[(seed * 31 + place * 7) % N_PIECES for place in range(n)] for seed, n in enumerate(LENGTHS, 1)]
    expected = [continuation(model, ids) for ids in prompts]
    # Blocks for all prompts, but not for their continuations.
    async with forked(tmp_path, tensor_parallel=ranks, max_running=8, kv_tokens=176) as engine:
        requests = [ask(ids, N_TOKENS, min_tokens=N_TOKENS) for ids in prompts]
        assert [one.ids for one in await asyncio.gather(*(complete(engine, one) for one in requests))] == expected
        assert engine.counters.preemptions > 0
        hits = engine.counters.prefix_hit_tokens
        again = [ask(ids, N_TOKENS, min_tokens=N_TOKENS) for ids in (prompts[2], [*prompts[2], *expected[2][:2]])]
        same, following = [(await complete(engine, one)).ids for one in again]
        assert (same, following[: N_TOKENS - 2]) == (expected[2], expected[2][2:])
        assert engine.counters.prefix_hit_tokens > hits
        resumed = ask(prompts[1], N_TOKENS, generated=tuple(expected[1][:7]), min_tokens=N_TOKENS)
        assert (await complete(engine, resumed)).ids == expected[1][7:]
        assert engine.state().pull_bytes_per_s == 0, "other workers get no blocks without their states"
