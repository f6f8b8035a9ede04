"""Promises of our side of vLLM for every behaviour of vLLM: indices, handoffs, suspects, recovery."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from ryzanstein.v1 import worker_pb2 as pb

from services.common.lifecycle import GaveUpError, StartupError
from services.worker.adapters.slots import AdapterSources
from services.worker.engine.errors import InvalidRequestError, TooLongError, UnsupportedError
from services.worker.engine.output import Finish
from services.worker.engine.request import AdapterRef, EngineRequest
from services.worker.engine.state import AdapterFacts, EngineModel
from services.worker.vllm.core import CoreLoss
from services.worker.vllm.engine import VllmEngine
from services.worker.vllm.progress import _PHASES, IMPORTING
from tests.integration.worker_engine.answers import Answer
from tests.integration.worker_engine.vllm_fake_core import KILLED, STARTED, FakeCore
from tests.integration.worker_server.gateway import until
from tests.unit.worker.engine.stand_ins import MODEL, NoObserver

PROMPT = tuple(range(40))
EMBEDS = replace(MODEL, generates=False)
CLASSIFIES = replace(EMBEDS, classes=pb.Classes(labels=["good", "bad"]))


def ask(name: str = "r", *, generated: tuple[int, ...] = (), trial_tokens: int = 0, **sampling: object):
    chosen = pb.Sampling(**{"max_tokens": 9, **sampling})
    return EngineRequest(name, PROMPT, chosen, generated_ids=generated, trial_tokens=trial_tokens)


class RecordingSink(Answer):
    def __init__(self) -> None:
        super().__init__()
        self.on_trial = False

    def announce_trial(self, request: EngineRequest) -> None:
        self.on_trial = True


class Losses(NoObserver):
    def __init__(self) -> None:
        self.causes: list[str] = []

    def on_lost(self, cause: str, rank: int | None) -> None:
        self.causes.append(cause)


def made(
    core: FakeCore,
    limit_s: float = 0.0,
    losses: Losses | None = None,
    sources: AdapterSources | None = None,
    model: EngineModel = MODEL,
) -> VllmEngine:
    return VllmEngine(limit_s, model, core, NoObserver(), losses or NoObserver(), sources)


@asynccontextmanager
async def serving(
    core: FakeCore,
    losses: Losses | None = None,
    sources: AdapterSources | None = None,
    model: EngineModel = MODEL,
) -> AsyncGenerator[VllmEngine, None]:
    engine = made(core, losses=losses, sources=sources, model=model)
    running = asyncio.create_task(engine.run())
    await until_phase(engine, pb.PHASE_SERVING)
    yield engine
    running.cancel()
    await asyncio.wait([running])


async def until_phase(engine: VllmEngine, phase: int) -> None:
    async with asyncio.timeout(60):
        with engine.changes.watch() as changed:
            while engine.phase != phase:
                await changed.wait()
                changed.clear()


def submitted(engine: VllmEngine, request: EngineRequest) -> RecordingSink:
    sink = RecordingSink()
    engine.submit(request, sink)
    return sink


async def test_a_resumed_request_is_a_longer_prompt_and_goes_on_at_its_index() -> None:
    core = FakeCore()
    async with serving(core) as engine:
        sink = submitted(engine, ask(generated=(1, 2, 3), min_tokens=5, prompt_logprobs=1))
        await core.step()
        (given,) = core.added
        assert list(given.token_ids) == [*PROMPT, 1, 2, 3]
        assert (given.arguments["max_tokens"], given.arguments["min_tokens"]) == (6, 2)
        assert given.arguments["prompt_logprobs"] is None
        (output,) = sink.outputs
        assert (output.first_index, output.token_ids) == (3, (7,))
        assert output.prefill is not None
        assert output.prefill.cached_tokens == 21
        state = engine.state()
        assert (state.running, state.waiting, state.kv_blocks_used, state.kv_blocks_total) == (1, 0, 8, 16)
        await core.step(last=True)
        assert sink.finish is Finish.LENGTH
        assert engine.counters.prefill_tokens + engine.counters.prefix_hit_tokens == 43
        assert engine.state().running == engine.state().waiting == 0


async def test_images_keep_their_places_in_a_resumed_request() -> None:
    core, takes = FakeCore(), pb.ImageInput(layout="qwen2_5_vl", token=9, cell=2, frame_tokens=6)
    image = pb.Image(first=4, tokens=6, frames=bytes(72), digest=b"a", columns=3)
    async with serving(core, model=replace(MODEL, images=takes)) as engine:
        submitted(engine, replace(ask(generated=(1, 2)), images=[image]))
        await core.step(last=True)
    ((shown,),) = (given.images for given in core.added)
    assert (shown.first, shown.n_tokens, shown.width, shown.height) == (4, 6, 6, 4)


async def test_every_step_moves_every_request_that_has_not_ended() -> None:
    core = FakeCore()
    async with serving(core) as engine:
        request, suspect = ask(), ask("suspect", trial_tokens=2)
        submitted(engine, request)
        submitted(engine, suspect)
        before = [engine.progress(one) for one in (request, suspect)]
        assert [progress.computed_tokens for progress in before] == [0, 0], "vLLM says nothing of a part of a prompt"
        assert [engine.progress(one) for one in (request, suspect)] == before, "without a step nothing moves"
        await core.step()
        after = [engine.progress(one) for one in (request, suspect)]
        assert [progress.computed_tokens for progress in after] == [len(PROMPT)] * 2
        assert all(one.signs > other.signs for one, other in zip(after, before, strict=True))


async def test_resume_with_penalties_or_grammar_regenerates_the_tokens() -> None:
    core = FakeCore()
    async with serving(core) as engine:
        sink = submitted(engine, ask(generated=(7, 7), presence_penalty=0.5))
        other = submitted(engine, ask("other", generated=(7, 1), grammar="start: /a+/"))
        assert [list(given.token_ids) for given in core.added] == [[*PROMPT], [*PROMPT]]
        assert core.added[0].arguments["max_tokens"] == 9
        for _ in range(2):
            await core.step()
        assert sink.outputs == []
        assert (other.finish, other.outputs[-1].failed_field) == (Finish.FAILED, "grammar")
        assert "from token 1 on" in other.outputs[-1].failure
        await core.step(last=True)
        (output,) = sink.outputs
        assert (output.first_index, output.token_ids, output.finish) == (2, (7,), Finish.LENGTH)
        assert output.prefill is not None


@pytest.mark.parametrize(("model", "task"), [(EMBEDS, "embed"), (CLASSIFIES, "classify")])
async def test_pooling_model_gives_one_vector_by_its_task(model: EngineModel, task: str) -> None:
    core = FakeCore()
    async with serving(core, model=model) as engine:
        request = EngineRequest("e", PROMPT, pb.Sampling(), embed=True, second_from=3, priority=7)
        sink = submitted(engine, request)
        with pytest.raises(InvalidRequestError) as refused:
            submitted(engine, ask())
        assert refused.value.field == "embed"
        await core.step()
        (given,) = core.added
        assert (given.task, given.second_from, given.arguments, given.priority) == (task, 3, {}, 7)
        (output,) = sink.outputs
        assert (output.finish, output.embedding) == (Finish.EMBEDDED, (3.0, 0.5))
        assert (engine.state().running, engine.state().waiting) == (0, 0)


async def test_encoder_without_kv_takes_texts_of_the_whole_context() -> None:
    core = FakeCore(replace(STARTED, n_blocks=0, max_model_len=50))
    async with serving(core, model=EMBEDS) as engine:
        assert (engine.state().max_request_tokens, engine.state().kv_blocks_total) == (50, 0)
        submitted(engine, EngineRequest("e", tuple(range(50)), pb.Sampling(), embed=True))
        with pytest.raises(TooLongError):
            submitted(engine, EngineRequest("long", tuple(range(51)), pb.Sampling(), embed=True))


@pytest.mark.parametrize("model", [MODEL, EMBEDS, CLASSIFIES])
async def test_model_that_vllm_pools_by_tokens_is_refused_at_the_start(model: EngineModel) -> None:
    engine = made(FakeCore(replace(STARTED, tasks=frozenset({"token_embed", "token_classify"}))), model=model)
    with pytest.raises(StartupError, match="its tasks are token_classify, token_embed: use a model that"):
        await engine.run()


async def test_request_unsupported_by_vllm_is_rejected_by_field() -> None:
    async with serving(FakeCore()) as engine:
        for request, field in (
            (ask(temperature=3.0), "sampling.temperature"),
            (ask(frequency_penalty=-2.5), "sampling.frequency_penalty"),
            (ask(grammar='{"grammars": [{"json_schema": {}}, {"lark_grammar": "start: /a/"}]}'), "sampling.grammar"),
            (EngineRequest("e", PROMPT, pb.Sampling(), embed=True), "embed"),
        ):
            with pytest.raises(InvalidRequestError) as refused:
                submitted(engine, request)
            assert refused.value.field == field
        with pytest.raises(TooLongError):
            submitted(engine, EngineRequest("long", tuple(range(64)), pb.Sampling()))
        assert engine.state().waiting == 0


@pytest.mark.parametrize("loss", [KILLED, CoreLoss("stalled", "process 7 is stopped by a signal after step 1")])
async def test_lost_core_hands_off_all_requests_and_the_engine_serves_again(loss: CoreLoss) -> None:
    core, losses = FakeCore(), Losses()
    async with serving(core, losses) as engine:
        running, suspect, behind = (
            submitted(engine, request) for request in (ask(), ask("s", trial_tokens=2), ask("t", trial_tokens=2))
        )
        await core.step()
        engine.kv_events.stored([1])
        core.failures = ["no memory"]
        core.lose(loss)
        await until_phase(engine, pb.PHASE_RECOVERING)
        assert losses.causes == [loss.cause]
        for sink, in_flight in ((running, True), (suspect, True), (behind, False)):
            assert sink.handoff is not None
            assert (sink.handoff.reason, sink.handoff.in_flight) == (pb.Handoff.REASON_RANKS_LOST, in_flight)
            assert sink.handoff.detail == loss.detail
        refusal = engine.refusal()
        assert refusal is not None
        assert refusal.reason == pb.Handoff.REASON_LOADING
        await until_phase(engine, pb.PHASE_SERVING)
        assert core.starts == 3
        again = submitted(engine, ask("u"))
        await core.step(last=True)
        assert again.finish is Finish.LENGTH


async def test_suspects_run_sequentially_alongside_other_requests() -> None:
    core = FakeCore()
    async with serving(core) as engine:
        first, second, third = (ask(name, trial_tokens=2) for name in "abc")
        sinks = [submitted(engine, request) for request in (first, second, third)]
        await core.step()
        assert (core.begun, [sink.on_trial for sink in sinks]) == (["a"], [True, False, False])
        engine.cancel(second)
        await core.step()  # the first suspect is cleared by its second token
        await core.step()
        assert core.begun == ["a", "c"]
        assert sinks[1].outputs == []


async def test_fault_of_a_request_fails_only_that_request() -> None:
    core = FakeCore()
    async with serving(core) as engine:
        core.broken = "bad"
        sinks = [submitted(engine, ask("bad")), submitted(engine, ask("good"))]
        await core.step()
        assert sinks[0].handoff is not None
        assert (sinks[0].handoff.reason, sinks[0].handoff.in_flight) == (pb.Handoff.REASON_FAILED, False)
        assert sinks[1].handoff is None
        core.broken = "bad grammar"
        followed = submitted(engine, ask("bad grammar", grammar="start: /a+/"))
        await core.step()
        assert (followed.finish, followed.outputs[-1].failure) == (Finish.FAILED, "the request alone")


class Sources(AdapterSources):
    """Every folder holds an adapter, whose digest is the folder's name."""

    async def inspect(self, source: str, name: str = "", on_read: object = None) -> AdapterFacts:
        return AdapterFacts(name, Path(source).name, source, 8)


def adapted(name: str) -> EngineRequest:
    return replace(ask(name), adapter=AdapterRef(name, f"/{name}", name))


async def test_request_with_an_adapter_begins_after_the_load_and_ends_when_refused() -> None:
    core = FakeCore()
    core.broken = "bad"
    async with serving(core, sources=Sources(None, 64, (), (), n_slots=1)) as engine:  # type: ignore[arg-type]
        good, bad, plain = (submitted(engine, request) for request in (adapted("good"), adapted("bad"), ask()))
        await until(lambda: "good" in core.begun)
        assert (core.adapters, bad.refusal) == (["good"], None), "the only slot is in use"
        await core.step(last=True)
        await until(lambda: bad.refusal is not None)
        assert (good.finish, plain.finish) == (Finish.LENGTH, Finish.LENGTH)
        assert bad.refusal is not None
        assert (bad.refusal.field, str(bad.refusal)) == ("adapter", "/bad: no LoRA for this model")
        assert (core.adapters, engine.state().waiting, engine.counters.adapter_evictions) == ([], 0, 1)


async def test_resident_adapters_are_loaded_again_by_the_wake_and_pinned_adapters_by_a_restart() -> None:
    core = FakeCore()
    async with serving(core, sources=Sources(None, 64, (), (), n_slots=3)) as engine:  # type: ignore[arg-type]
        engine.pin_adapters([AdapterRef("pinned", "/pinned", "pinned")])
        request = submitted(engine, adapted("used"))
        await until(lambda: "used" in core.begun)
        await core.step(last=True)
        assert request.finish is Finish.LENGTH
        await engine.sleep(2)
        core.adapters.clear()  # contents of a GPU are lost
        engine.wake()
        await until(lambda: sorted(core.adapters) == ["pinned", "used"])
        assert {one.name: one.in_slot for one in engine.state().adapters} == {"pinned": True, "used": True}
        core.lose()
        await until(lambda: core.starts == 2 and core.adapters == ["pinned"])


async def test_first_start_failure_is_final_and_restart_gives_up_after_its_attempts() -> None:
    core = FakeCore()
    core.failures = ["out of memory"]
    with pytest.raises(StartupError, match="out of memory"):
        await made(core).run()
    core = FakeCore()
    engine = made(core, limit_s=0.3)
    running = asyncio.create_task(engine.run())
    await until_phase(engine, pb.PHASE_SERVING)
    core.failures = ["gone"] * 99
    core.lose()
    with pytest.raises(GaveUpError, match=r"0\.3 s .*: gone"):
        await running


async def test_engine_falls_asleep_at_a_level_and_wakes() -> None:
    core = FakeCore()
    async with serving(core) as engine:
        await engine.sleep(2)
        await engine.sleep(1)
        assert (engine.phase, core.slept) == (pb.PHASE_SLEEPING, [2])
        engine.wake()
        await until_phase(engine, pb.PHASE_SERVING)
        assert (core.wakes, core.starts) == (1, 1)
        assert engine.state().wake_ms > 0


async def test_stages_after_the_weights_are_warming() -> None:
    core = FakeCore()
    engine = made(core)
    for stage in dict.fromkeys((IMPORTING, *(stage for _, stage in _PHASES))):
        core.on_phase(stage)
        state = engine.state()
        assert (state.phase, state.detail) == (pb.PHASE_LOADING, stage)
        assert state.warming is (stage not in (IMPORTING, "loading weights"))


async def test_engine_without_sleep_mode_names_its_argument() -> None:
    async with serving(FakeCore(replace(STARTED, sleeps=False))) as engine:
        with pytest.raises(UnsupportedError) as refused:
            await engine.sleep(1)
        assert 'RYZANSTEIN_ENGINE_ARGS {"enable_sleep_mode": true}' in str(refused.value)
        assert engine.phase == pb.PHASE_SERVING


async def test_failed_sleep_ends_the_processes_until_the_wake() -> None:
    core = FakeCore()
    async with serving(core) as engine:
        core.stuck = True
        await engine.sleep(1)
        await until(lambda: "the sleep failed: it does not sleep" in engine.detail)
        assert engine.phase == pb.PHASE_SLEEPING
        engine.wake()
        await until_phase(engine, pb.PHASE_SERVING)
        assert core.starts == 2


async def test_failed_wake_restarts_the_processes_with_its_reason() -> None:
    core, losses = FakeCore(), Losses()
    async with serving(core, losses) as engine:
        await engine.sleep(1)
        core.stuck = True
        engine.wake()
        await until_phase(engine, pb.PHASE_RECOVERING)
        assert engine.detail == "the wake failed: out of memory"
        await until_phase(engine, pb.PHASE_SERVING)
        assert (core.starts, losses.causes) == (2, ["exited"])


async def test_processes_lost_asleep_are_started_again_by_the_wake() -> None:
    core = FakeCore()
    async with serving(core) as engine:
        await engine.sleep(1)
        core.lose()
        await until(lambda: KILLED.detail in engine.detail)
        assert (engine.phase, core.starts) == (pb.PHASE_SLEEPING, 1)
        engine.wake()
        await until_phase(engine, pb.PHASE_SERVING)
        assert (core.wakes, core.starts) == (0, 2)
