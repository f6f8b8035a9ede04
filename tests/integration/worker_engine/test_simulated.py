"""Simulated workers: our scheduler on ranks that compute nothing, whose answers follow from their requests."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator

import pytest
import pytest_asyncio
from ryzanstein.v1 import worker_pb2 as pb
from tokenizers import Tokenizer

from services.worker.engine.errors import InvalidRequestError
from services.worker.engine.output import Finish
from services.worker.engine.request import EngineRequest
from services.worker.process.failure import FailureKind, RankFailure
from services.worker.protocol.plan import Admission, Chunk, StepPlan
from services.worker.settings import WorkerSettings
from services.worker.simulated.opening import SimulatedEngine, SimulatedModel, open_model
from services.worker.simulated.sequences import Sequences
from tests.integration.worker_engine.answers import ask, complete, serves, submitted
from tests.integration.worker_engine.engines import serving
from tests.models import BUNDLED_MODEL
from tests.unit.worker.engine.stand_ins import NoObserver

SETTINGS = WorkerSettings(
    model=str(BUNDLED_MODEL),
    engine="simulated",
    engine_args={"speed": 20.0, "answer_tokens": 12},
    kv_tokens=512,
    max_model_len=256,
    max_running=8,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def model() -> SimulatedModel:
    return await open_model(SETTINGS, BUNDLED_MODEL)


@pytest_asyncio.fixture(loop_scope="module")
async def engine(model: SimulatedModel) -> AsyncGenerator[SimulatedEngine, None]:
    async with serving(model.engine(NoObserver(), NoObserver())) as running:
        assert isinstance(running, SimulatedEngine)
        yield running


def prompts(n: int, shared: int = 0, own: int = 40) -> list[list[int]]:
    rng = random.Random(n)
    prefix = [rng.randrange(4, 4000) for _ in range(shared)]
    return [[*prefix, *(rng.randrange(4, 4000) for _ in range(own))] for _ in range(n)]


def expected(model: SimulatedModel, request: EngineRequest) -> list[int]:
    return model.simulation.language.continuation(request.prompt_ids, request.sampling)


async def test_every_answer_is_the_function_of_its_request_under_sharing_and_preemption(
    model: SimulatedModel, engine: SimulatedEngine
) -> None:
    """Twice as many as fit the KV cache: requests wait, are preempted, and share blocks."""
    requests = [ask(prompt, n=64) for prompt in prompts(12, shared=48)]
    answers = [submitted(engine, request) for request in requests]
    for request, answer in zip(requests, answers, strict=True):
        await answer.until(10**9)
        assert answer.ids == expected(model, request)
    assert engine.counters.preemptions > 0
    assert engine.counters.prefix_hit_tokens > 0


async def test_answer_ends_with_a_stop_token_where_one_may_stand(
    model: SimulatedModel, engine: SimulatedEngine
) -> None:
    (eos, *_) = model.model.eos_token_ids
    ends = []
    for prompt in prompts(4):
        answer = await complete(engine, ask(prompt, n=200, stop_token_ids=[eos]))
        ends.append(answer.finish)
        if answer.finish is Finish.STOP:
            assert answer.ids[-1] == eos
            more = await complete(engine, ask(prompt, n=200, stop_token_ids=[eos], min_tokens=len(answer.ids)))
            assert len(more.ids) > len(answer.ids)
    assert Finish.STOP in ends


async def test_text_decodes_to_words(model: SimulatedModel, engine: SimulatedEngine) -> None:
    answer = await complete(engine, ask(n=32))
    text = Tokenizer.from_buffer(model.model.tokenizer_json).decode(answer.ids)
    assert all(word.isalpha() and word.isascii() for word in text.split())
    assert len(text.split()) >= 32


async def test_prompt_counts_as_queued_until_computed(engine: SimulatedEngine) -> None:
    """Routers would take a worker for idle while it computes a long prompt in one step."""
    (prompt,) = prompts(1)
    await complete(engine, ask(n=1))  # its ranks have started
    engine.ranks.stall(2.0)
    answer = submitted(engine, ask(prompt, n=2))
    await asyncio.sleep(0.05)
    assert (engine.state().queued_prefill_tokens, answer.ids) == (len(prompt), [])
    await answer.until(10**9)
    assert engine.state().queued_prefill_tokens == 0


async def test_wrong_block_in_the_cache_changes_the_answer(model: SimulatedModel, engine: SimulatedEngine) -> None:
    """Else no check of an answer would find a wrong block table."""
    (prompt,) = prompts(1)
    request = ask(prompt)
    assert (await complete(engine, request)).ids == expected(model, request)
    for block, kv in enumerate(engine.ranks.kv):
        engine.ranks.kv[block] = kv[::-1]
    assert (await complete(engine, request)).ids != expected(model, request)


@pytest.mark.parametrize("at", [0, 1, 3])
async def test_proposals_are_drawn_up_to_the_first_wrong_guess(at: int, model: SimulatedModel) -> None:
    (prompt,) = prompts(1)
    request = ask(prompt, n=6)
    right = expected(model, request)
    guesses = (*right[1 : at + 1], 0, *right[at + 2 : 5])
    sequences = Sequences(model.simulation.language, 8, 8)
    first = Chunk(0, 0, len(prompt), draws=True, new_blocks=(1, 2, 3))
    drafted = Chunk(0, len(prompt), 1 + len(guesses), draws=True, proposals=guesses)
    admission = Admission(0, request.sampling, tuple(prompt), len(prompt))
    sequences.compute(StepPlan(0, admissions=(admission,), chunks=(first,)), {})
    (result,), _ = sequences.compute(StepPlan(1, chunks=(drafted,)), {})
    assert list(result.token_ids) == right[1 : at + 2]


@pytest.mark.parametrize("fault", ["lost", "stalled"])
async def test_requests_of_lost_ranks_are_handed_off_and_continue_exactly(
    fault: str, model: SimulatedModel, engine: SimulatedEngine
) -> None:
    request = ask(n=150)
    answer = submitted(engine, request)
    await answer.until(3)
    if fault == "lost":
        engine.ranks.lose(RankFailure(0, FailureKind.EXITED, "killed by a test"))
    else:
        engine.ranks.stall(10 * SETTINGS.stall_timeout_s)
    await answer.until(10**9)
    assert answer.handoff is not None
    assert answer.handoff.reason == pb.Handoff.REASON_RANKS_LOST
    await serves(engine)
    rest = await complete(engine, ask(n=150, generated=tuple(answer.ids)))
    assert answer.ids + rest.ids == expected(model, request)


async def test_short_stall_delays_an_answer_and_changes_no_token(
    model: SimulatedModel, engine: SimulatedEngine
) -> None:
    request = ask(n=60)
    answer = submitted(engine, request)
    await answer.until(3)
    engine.ranks.stall(0.2)
    before = engine.ranks.signs
    assert engine.ranks.signs == before, "no sign of life during a stall"
    await answer.until(10**9)
    assert answer.ids == expected(model, request)


async def test_grammar_is_refused_by_its_field(engine: SimulatedEngine) -> None:
    with pytest.raises(InvalidRequestError, match="follows no grammar") as refused:
        submitted(engine, ask(grammar="start: /a/"))
    assert refused.value.field == "grammar"


async def test_blocks_of_another_simulated_worker_are_as_good_as_own_blocks(
    model: SimulatedModel, engine: SimulatedEngine
) -> None:
    (prompt,) = prompts(1, own=80)
    await complete(engine, ask(prompt))
    blocks = await engine.ranks.read_blocks([1, 2], 64)
    assert [len(block) for block in blocks] == [64, 64]
    async with serving(model.engine(NoObserver(), NoObserver())) as other:
        assert isinstance(other, SimulatedEngine)
        await other.ranks.write_blocks([5, 6], blocks)
        assert await other.ranks.read_blocks([5, 6], 64) == blocks
