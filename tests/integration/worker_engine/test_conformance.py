"""Promises of every engine to the API in front of it, on real engines."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from ryzanstein.v1 import worker_pb2 as pb
from safetensors.torch import load_file, save_file

from services.common.blockhash import adapted_root, wire_chain
from services.worker.engine.base import Engine
from services.worker.engine.errors import (
    InvalidRequestError,
    NotServingError,
    PhaseRefusedError,
    TooLongError,
    UnsupportedError,
)
from services.worker.engine.output import Finish
from services.worker.engine.request import AdapterRef, EngineRequest
from services.worker.engine.state import AdapterFacts
from tests.adapters import write_adapter
from tests.integration.worker_engine.answers import (
    LENGTH,
    NEAR_TIE,
    PROMPT,
    Answer,
    ask,
    cached,
    check_same,
    complete,
    idle,
    serves,
    submitted,
)
from tests.integration.worker_engine.engines import COMPUTING, ENGINES
from tests.models import BUNDLED_MODEL

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(900)]

by_weights = pytest.mark.parametrize("engine", COMPUTING, indirect=True)
BLOCK_TOKENS = {"vllm": 32}  # a part of a larger KV block is not reused


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=ENGINES)
async def engine(request: pytest.FixtureRequest) -> AsyncGenerator[Engine, None]:
    async with ENGINES[request.param]() as running:
        yield running


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


@by_weights
async def test_prompt_log_probabilities_are_those_of_the_same_tokens_generated(engine: Engine) -> None:
    answer = await complete(engine, ask(logprobs=2))
    text = [*PROMPT, *answer.ids]
    for _ in range(2):  # the second time, the prefix cache holds the prompt
        scored = await complete(engine, ask(text, n=2, prompt_logprobs=2))
        assert scored.outputs[0].prefill is not None
        rows = scored.outputs[0].prefill.prompt_logprobs
        assert [row.token_id for row in rows] == text[1:]
        assert all(row.logprob <= 0 and row.rank >= 1 and len(row.top_ids) == 2 for row in rows)
        assert [row.logprob for row in rows[-LENGTH:]] == pytest.approx(
            [row.logprob for row in answer.logprobs], abs=NEAR_TIE
        )
        assert not any(output.prefill for output in scored.outputs[1:])


@by_weights
async def test_waiting_request_of_a_lower_priority_number_begins_first(engine: Engine) -> None:
    crowd = [submitted(engine, ask([n, *PROMPT], n=30 + 5 * n)) for n in range(8)]  # as many as run at a time
    await crowd[-1].until(1)
    last, first = (submitted(engine, replace(ask(n=2), priority=priority)) for priority in (5, -5))
    for answer in (*crowd, last, first):
        await answer.until(10**9)
    begins = [answer.outputs[0].prefill for answer in (first, last)]
    assert begins[0] is not None
    assert begins[1] is not None
    assert begins[0].admitted_at < begins[1].admitted_at


def adapted(request: EngineRequest, facts: AdapterFacts) -> EngineRequest:
    return replace(request, adapter=AdapterRef(facts.digest, facts.source, Path(facts.source).name))


def write_deaf_adapter(folder: Path) -> None:
    """An adapter that takes away what attention adds, so that no position sees those before it."""
    write_adapter(BUNDLED_MODEL, folder, {"o_proj": 256}, lora_alpha=256)
    weights = load_file(BUNDLED_MODEL / "model.safetensors")
    tensors = {}
    for name in load_file(folder / "adapter_model.safetensors"):
        weight = weights[f"{name.removeprefix('base_model.model.').rpartition('.lora_')[0]}.weight"].float()
        tensors[name] = torch.eye(256) if "lora_A" in name else -weight
    save_file(tensors, folder / "adapter_model.safetensors")


@by_weights
async def test_adapter_computes_with_its_weights_beside_other_requests(engine: Engine, tmp_path: Path) -> None:
    write_deaf_adapter(tmp_path / "deaf")
    deaf = await engine.inspect_adapter(str(tmp_path / "deaf"))
    assert deaf.rank == 256
    prompts = [*PROMPT, 7], [9, 8, 7]
    base = await complete(engine, ask(prompts[0], logprobs=2))
    requests = [adapted(ask(prompt, logprobs=2), deaf) for prompt in prompts]
    *answers, plain = [submitted(engine, request) for request in (*requests, ask(prompts[0]))]
    for answer in (*answers, plain):
        await answer.until(10**9)
    check_same(engine, base, plain.ids)
    long, short = ([row.logprob for row in answer.logprobs] for answer in answers)
    assert long == pytest.approx(short, abs=NEAR_TIE)
    assert long[0] != pytest.approx(base.logprobs[0].logprob, abs=0.1)
    actual = {one.name: one.in_slot for one in engine.state().adapters}
    assert actual["deaf"]
    block = BLOCK_TOKENS.get(engine.model.engine, 1)
    root = adapted_root(engine.model.hash_root, deaf.digest)
    await cached(engine, set(wire_chain(root, "", [*prompts[0], *answers[0].ids][: len(PROMPT) // block * block])))


@by_weights
async def test_adapters_share_the_slots_and_pinned_adapters_stay(engine: Engine, tmp_path: Path) -> None:
    facts = []
    for seed in range(3):
        write_adapter(BUNDLED_MODEL, tmp_path / f"{seed}", {"q_proj": 8, "down_proj": 8}, seed=seed, size=0.3)
        facts.append(await engine.inspect_adapter(str(tmp_path / f"{seed}")))
    evicted = engine.counters.adapter_evictions
    texts = [(await complete(engine, adapted(ask(logprobs=2), one))) for one in facts]
    assert len({tuple(answer.ids) for answer in texts}) == len(facts)
    assert engine.counters.adapter_evictions > evicted, "three adapters take turns in two slots"
    together = [submitted(engine, adapted(ask(), one)) for one in facts]
    for text, answer in zip(texts, together, strict=True):
        await answer.until(10**9)
        check_same(engine, text, answer.ids)
    pinned = AdapterRef(facts[0].digest, facts[0].source, "pinned")
    engine.pin_adapters((pinned,))
    for one in (*facts[1:], *facts[1:]):
        await complete(engine, adapted(ask(n=1), one))
    assert {one.digest: one.in_slot for one in engine.state().adapters}[pinned.digest]
    engine.pin_adapters(())


@by_weights
async def test_adapter_that_does_not_fit_is_refused_by_field(engine: Engine, tmp_path: Path) -> None:
    write_adapter(BUNDLED_MODEL, tmp_path / "one", {"q_proj": 8})
    facts = await engine.inspect_adapter(str(tmp_path / "one"))
    write_adapter(BUNDLED_MODEL, tmp_path / "one", {"q_proj": 8}, seed=1)
    changed = await complete(engine, adapted(ask(), facts))
    write_adapter(BUNDLED_MODEL, tmp_path / "two", {"q_proj": 8}, use_dora=True)
    for source, reason in ((tmp_path / "two", "use_dora"), (tmp_path / "none", "no adapter_config"), (Path("/"), "")):
        with pytest.raises(InvalidRequestError, match=reason) as refused:
            await engine.inspect_adapter(str(source))
        assert refused.value.field == "adapter"
    assert changed.refusal is not None
    assert changed.refusal.field == "adapter"
    assert not changed.outputs
    await idle(engine)


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
    await cached(engine, wanted)
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
