"""Decodes of models with states attend to some keys only: texts do not depend on how they are computed."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from ryzanstein.v1.worker_pb2 import Attention

from tests.integration.worker_engine.answers import ask, complete
from tests.integration.worker_engine.forked_engine import forked
from tests.integration.worker_engine.test_states import N_TOKENS, continuation
from tests.unit.compute.model.zoo import N_PIECES, write_with_tokenizer

LENGTHS = (100, 40, 75, 16, 17)
EVERY_PAGE = Attention(pages=8)  # those of 128 tokens
NARROW = (Attention(pages=4), Attention(sinks=16, window=20))


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("variant", "ranks"),
    [  # attention between kinds of layers with a state, shared by layers, gated, of latents, next to a state
        *[("lfm2", 1), ("zamba2", 2), ("qwen3_5", 1), ("kimi_linear", 1), ("falcon_h1", 2)],
    ],
)
async def test_texts_are_the_same_alone_after_preemptions_from_snapshots_and_resumed(
    variant: str, ranks: int, tmp_path: Path
) -> None:
    model = write_with_tokenizer(variant, tmp_path)
    # Blocks for all prompts, but not for their continuations.
    async with forked(tmp_path, tensor_parallel=ranks, max_running=8, kv_tokens=288, page_summaries=True) as engine:

        async def text(ids: list[int], attention: Attention, generated: tuple[int, ...] = ()) -> list[int]:
            request = ask(ids, N_TOKENS, attention=attention, min_tokens=N_TOKENS, generated=generated)
            return (await complete(engine, request)).ids

        for first, attention in zip((1, 6), NARROW, strict=True):
            prompts = [
                [(seed * 31 + place * 7) % N_PIECES for place in range(n)] for seed, n in enumerate(LENGTHS, first)
            ]
            together = await asyncio.gather(*(text(ids, attention) for ids in prompts))
            assert engine.counters.preemptions > 0
            alone = [await text(ids, attention) for ids in prompts]
            assert together == alone
            hits = engine.counters.prefix_hit_tokens
            assert await text(prompts[-1], attention) == alone[-1]
            assert engine.counters.prefix_hit_tokens > hits
            assert await text(prompts[0], attention, tuple(alone[0][:7])) == alone[0][7:]
        assert await text(prompts[0], EVERY_PAGE) == continuation(model, prompts[0])
