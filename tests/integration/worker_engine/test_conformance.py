"""What every engine promises to the API in front of it, on engines that really run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

import pytest
import pytest_asyncio
from ryzanstein.v1 import worker_pb2 as pb

from services.common.blockhash import wire_chain
from services.compute.token_logprobs import TokenLogprobs
from services.worker.engine.base import Engine
from services.worker.engine.errors import (
    InvalidRequestError,
    NotServingError,
    PhaseRefusedError,
    TooLongError,
    UnsupportedError,
)
from services.worker.engine.output import Finish, Output
from services.worker.engine.request import EngineRequest
from tests.integration.worker_engine.engines import ENGINES

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(900)]

PROMPT = list(range(5, 45))
LENGTH = 24
NEAR_TIE = 1e-3
BLOCK_TOKENS = {"vllm": 32}  # a part of a larger KV block is not reused


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=ENGINES)
async def engine(request: pytest.FixtureRequest) -> AsyncGenerator[Engine, None]:
    async with ENGINES[request.param]() as running:
        yield running


@dataclass(eq=False)
class Answer:
    """Implements OutputSink for one request."""

    outputs: list[Output] = field(default_factory=list)
    handoff: pb.Handoff | None = None
    flushed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def ids(self) -> list[int]:
        return [token for output in self.outputs for token in output.token_ids]

    @property
    def finish(self) -> Finish | None:
        return self.outputs[-1].finish if self.outputs else None

    @property
    def logprobs(self) -> list[TokenLogprobs]:
        return [row for output in self.outputs for row in output.logprobs]

    def add(self, request: EngineRequest, output: Output) -> None:
        assert self.finish is None, "output after the end"
        assert self.handoff is None, "output after a handoff"
        self.outputs.append(output)

    def refuse(self, request: EngineRequest, error: InvalidRequestError) -> None:
        raise error

    def announce_trial(self, request: EngineRequest) -> None:
        raise AssertionError("no request is a suspect")

    def hand_off(self, request: EngineRequest, handoff: pb.Handoff) -> None:
        self.handoff = handoff

    def flush(self, step: int) -> None:
        self.flushed.set()

    async def until(self, n_tokens: int) -> None:
        async with asyncio.timeout(60):
            while len(self.ids) < n_tokens and self.finish is None and self.handoff is None:
                self.flushed.clear()
                await self.flushed.wait()


def ask(prompt: list[int] = PROMPT, n: int = LENGTH, *, generated: tuple[int, ...] = (), **sampling: object):
    chosen = pb.Sampling(max_tokens=n, **sampling)
    return EngineRequest("r", prompt, chosen, generated_ids=generated)


def submitted(engine: Engine, request: EngineRequest) -> Answer:
    answer = Answer()
    engine.submit(request, answer)
    return answer


async def complete(engine: Engine, request: EngineRequest) -> Answer:
    answer = submitted(engine, request)
    await answer.until(10**9)
    return answer


def check_same(engine: Engine, whole: Answer, ids: list[int], begin: int = 0) -> None:
    """Check that `ids` are those of `whole` from `begin` on; an approximate engine may differ from a near tie on."""
    if ids == whole.ids[begin:]:
        return
    assert engine.model.resume == "approximate"
    at = next(at for at, (one, other) in enumerate(zip(whole.ids[begin:], ids, strict=True), begin) if one != other)
    likeliest, second = whole.logprobs[at].top_logprobs
    assert likeliest - second < NEAR_TIE, f"token {at} differs"


async def idle(engine: Engine) -> None:
    async with asyncio.timeout(60):
        with engine.changes.watch() as changed:
            while engine.state().running or engine.state().waiting:
                await changed.wait()
                changed.clear()


async def serves(engine: Engine) -> None:
    async with asyncio.timeout(60):
        with engine.changes.watch() as changed:
            while engine.phase != pb.PHASE_SERVING:
                await changed.wait()
                changed.clear()


async def test_engine_reports_the_facts_of_its_model(engine: Engine) -> None:
    assert engine.facts is not None
    assert engine.facts.vocab_size > max(PROMPT)
    assert engine.model.hash_root
    state = engine.state()
    assert (state.phase, state.detail) == (pb.PHASE_SERVING, "")
    assert state.max_request_tokens == engine.facts.max_request_tokens
    assert engine.refusal() is None


async def test_a_request_ends_with_its_length_and_every_token_has_its_index(engine: Engine) -> None:
    answer = await complete(engine, ask())
    assert answer.finish is Finish.LENGTH
    sizes = [len(output.token_ids) for output in answer.outputs]
    assert [output.first_index for output in answer.outputs] == [sum(sizes[:at]) for at in range(len(sizes))]
    assert len(answer.ids) == LENGTH
    first, *others = answer.outputs
    assert first.prefill is not None
    assert first.prefill.queued_at <= first.prefill.admitted_at
    assert not any(output.prefill for output in others)


async def test_engine_sleeps_when_idle_and_its_text_after_the_wake_is_the_same(engine: Engine) -> None:
    if engine.sleepless:
        with pytest.raises(UnsupportedError):
            await engine.sleep(1)
        return
    answer = submitted(engine, ask())
    with pytest.raises(PhaseRefusedError):
        await engine.sleep(1)
    await answer.until(LENGTH)
    await idle(engine)
    await engine.sleep(1)
    assert not engine.cached_hashes()
    with pytest.raises(NotServingError):
        engine.submit(ask(), Answer())
    engine.wake()
    await serves(engine)
    assert (await complete(engine, ask())).ids == answer.ids
    assert engine.state().wake_ms > 0


async def test_neighbours_change_no_token(engine: Engine) -> None:
    alone = [await complete(engine, ask([n, *PROMPT], logprobs=2)) for n in range(3)]
    together = [submitted(engine, ask([n, *PROMPT])) for n in range(3)]
    for one, answer in zip(alone, together, strict=True):
        await answer.until(LENGTH)
        check_same(engine, one, answer.ids)


async def test_stop_token_ends_the_answer_as_its_last_token(engine: Engine) -> None:
    ids = (await complete(engine, ask())).ids
    stop = ids[LENGTH // 2]
    answer = await complete(engine, ask(stop_token_ids=[stop]))
    assert answer.finish is Finish.STOP
    assert answer.ids == ids[: ids.index(stop) + 1]


async def test_seed_determines_the_sampled_tokens(engine: Engine) -> None:
    one, again, other = [(await complete(engine, ask(temperature=1.0, seed=seed))).ids for seed in (7, 7, 8)]
    assert one == again != other


async def test_log_probabilities_are_returned_for_every_token_on_request(engine: Engine) -> None:
    answer = await complete(engine, ask(logprobs=3))
    assert [row.token_id for row in answer.logprobs] == answer.ids
    assert all(row.logprob <= 0 and row.rank >= 1 and len(row.top_ids) == 3 for row in answer.logprobs)
    assert not (await complete(engine, ask())).logprobs


@pytest.mark.parametrize(
    "sampling",
    [{}, {"presence_penalty": 1.5}, {"temperature": 1.0, "seed": 11}],
    ids=["greedy", "penalised", "sampled"],
)
async def test_resumed_request_equals_an_uninterrupted_request(engine: Engine, sampling: dict[str, float]) -> None:
    whole = await complete(engine, ask(logprobs=2, **sampling))
    resumed = [submitted(engine, ask(generated=tuple(whole.ids[:at]), **sampling)) for at in range(1, LENGTH)]
    for at, answer in enumerate(resumed, start=1):
        await answer.until(LENGTH)
        assert answer.outputs[0].first_index == at
        assert len(answer.ids) == LENGTH - at
        if not sampling.get("temperature") or engine.model.resume == "exact":
            check_same(engine, whole, answer.ids, at)


async def test_progress_moves_while_a_request_waits_is_prefilled_and_generates(engine: Engine) -> None:
    crowd = [submitted(engine, ask([n, *PROMPT], n=60)) for n in range(9)]  # one more than run at a time
    request = ask(n=200)
    answer = submitted(engine, request)
    waiting, generating = engine.progress(request), []
    flush = answer.flush

    def read_and_flush(step: int) -> None:  # a step may end the request before a task that waits for outputs runs
        if answer.finish is None:
            generating.append(engine.progress(request))
        flush(step)

    answer.flush = read_and_flush  # type: ignore[method-assign]
    await crowd[0].until(3)
    begun = engine.progress(request)
    assert begun.signs != waiting.signs
    assert begun.computed_tokens >= waiting.computed_tokens
    for one in (*crowd, answer):
        await one.until(10**9)
    assert generating[-1].signs != begun.signs
    assert all(progress.computed_tokens >= len(PROMPT) for progress in generating)


async def test_cancelled_request_emits_no_more_tokens(engine: Engine) -> None:
    request = ask(n=200)
    answer = submitted(engine, request)
    await answer.until(3)
    engine.cancel(request)
    n_outputs = len(answer.outputs)
    await idle(engine)
    await complete(engine, ask())
    assert len(answer.outputs) == n_outputs
    engine.cancel(request)  # again, and nothing happens


async def test_oversized_request_is_rejected_by_field(engine: Engine) -> None:
    assert engine.facts is not None
    with pytest.raises(TooLongError) as refused:
        submitted(engine, ask([5] * engine.facts.max_request_tokens))
    assert refused.value.field == "prompt_ids"
    assert (engine.state().running, engine.state().waiting) == (0, 0)


async def test_embedding_is_a_single_output(engine: Engine) -> None:
    request = EngineRequest("e", PROMPT, pb.Sampling(), embed=True)
    if engine.model.engine == "vllm":  # a generating model does not embed there
        with pytest.raises(InvalidRequestError) as refused:
            submitted(engine, request)
        assert refused.value.field == "embed"
        return
    answer = await complete(engine, request)
    (output,) = answer.outputs
    assert (output.finish, output.token_ids, bool(output.embedding)) == (Finish.EMBEDDED, (), True)


async def test_the_state_counts_and_changes_are_announced(engine: Engine) -> None:
    before = engine.state().computed_tokens
    with engine.changes.watch() as changed:
        answer = submitted(engine, ask(n=100))
        await answer.until(2)
        assert changed.is_set()
    assert engine.state().running == 1
    await answer.until(100)
    await idle(engine)
    assert engine.state().computed_tokens >= before + 100
    assert engine.counters.generated_tokens >= 100


async def test_the_events_replayed_are_the_cache(engine: Engine) -> None:
    answer = await complete(engine, ask())
    block = BLOCK_TOKENS.get(engine.model.engine, 1)
    known = [*PROMPT, *answer.ids][:-1]
    wanted = set(wire_chain(engine.model.hash_root, "", known[: len(known) // block * block]))
    assert wanted
    async with asyncio.timeout(60):
        with engine.changes.watch() as changed:
            while not wanted <= set(engine.cached_hashes()):
                await changed.wait()
                changed.clear()
    held: set[int] = set()
    for event in engine.kv_events.since(0) or ():
        held = (set() if event.cleared else held | set(event.stored)) - set(event.removed)
    assert held == set(engine.cached_hashes())


async def test_drain_finishes_short_requests_hands_off_long_requests_and_is_final(engine: Engine) -> None:
    """The last test: nothing is taken on afterwards."""
    assert engine.facts is not None
    short, long = submitted(engine, ask(n=7)), submitted(engine, ask(n=0))
    await long.until(1)
    began = time.monotonic()
    await long.until(5)
    pace_s = (time.monotonic() - began) / 4  # time per token under the present load
    ended = await engine.drain(max(0.05, 30 * pace_s))
    assert ended in {(1, 1), (1, 0)}  # the short one may have ended before
    assert short.finish is Finish.LENGTH
    assert long.handoff is not None
    assert long.handoff.reason == pb.Handoff.REASON_DRAIN
    refusal = engine.refusal()
    assert refusal is not None
    assert refusal.reason == pb.Handoff.REASON_DRAIN
    assert engine.state().phase == pb.PHASE_DRAINING
    with pytest.raises(NotServingError):
        submitted(engine, ask())
