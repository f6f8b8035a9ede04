"""vLLM as an engine: its processes compute; we submit, cancel, hand off, and restart its processes after a loss."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from functools import partial

from ryzanstein.v1 import worker_pb2 as pb

from services.common.lifecycle import StartupError
from services.common.recovery import Recovery
from services.compute.ranks.memory import MemoryAccount
from services.worker.adapters.opening import pinned_refs
from services.worker.adapters.slots import AdapterSources, inspect
from services.worker.engine.base import Engine, LifeObserver, OutputSink, StepObserver, StepReport
from services.worker.engine.errors import (
    BlocksUnavailableError,
    InvalidRequestError,
    NotServingError,
    Unavailable,
)
from services.worker.engine.lifecycle import STARTING
from services.worker.engine.output import Finish, Output, Progress
from services.worker.engine.request import AdapterRef, EngineRequest
from services.worker.engine.state import AdapterFacts, EngineFacts, EngineModel, EngineState
from services.worker.vllm.adapters import VllmAdapters
from services.worker.vllm.core import (
    Core,
    CoreError,
    CoreRequest,
    CoreStarted,
    CoreStep,
    RequestFailedError,
)
from services.worker.vllm.images import images_of
from services.worker.vllm.kv_mirror import KvMirror
from services.worker.vllm.live import ReplayError, VllmRequest, prompt_of
from services.worker.vllm.progress import WARMING
from services.worker.vllm.sampling import check_length, replays, sampling_arguments
from services.worker.vllm.speeds import StepSpeeds
from services.worker.vllm.suspects import Suspects
from services.worker.vllm.tasks import check_task, task_of

log = logging.getLogger(__name__)


class VllmEngine(Engine):
    """vLLM as an engine."""

    def __init__(
        self,
        recovery_limit_s: float,
        model: EngineModel,
        core: Core,
        steps: StepObserver,
        life: LifeObserver,
        sources: AdapterSources | None = None,
    ) -> None:
        """`recovery_limit_s`: longest time of repeated attempts to restart; 0: no limit.

        `sources`: the adapters that it may load.
        """
        super().__init__(model, life, "starting vLLM")
        self._live: dict[EngineRequest, VllmRequest] = {}
        self._recovery_limit_s, self._core, self._steps = recovery_limit_s, core, steps
        self._mirror = KvMirror(model.hash_root, self.kv_events, self.changes.announce)
        self._speeds = StepSpeeds()
        self._suspects = Suspects(self._begin)
        pinned = pinned_refs(model.adapters)
        self._sources = sources
        self._adapters = VllmAdapters(sources, pinned, core, steps, self.counters, self.changes.announce)
        self._started: CoreStarted | None = None  # None while no processes serve
        self._last = CoreStep(0.0, 0, 0, 0.0, 0)
        self._failure = ""  # why a sleep or a wake failed, until the processes have ended
        self._step = 0
        self._dirty: set[OutputSink] = set()  # sinks with outputs of this step
        self._prefilled: list[
            tuple[int, float]
        ] = []  # computed tokens and admission of prompts that ended in this step
        self._rows = 0  # tokens computed in this step
        core.on_step, core.on_phase = self._on_step, self._on_phase

    def state(self) -> EngineState:
        """The current state; levels are 0 while nothing serves. Blocks are vLLM's."""
        state = EngineState(
            self.phase,
            self.detail,
            prefill_tokens_per_s=self._speeds.prefill_tokens_per_s,
            decode_step_ms=self._speeds.decode_step_ms,
            computed_tokens=self.counters.prefill_tokens + self.counters.generated_tokens,
            wake_ms=self.wake_ms,
            warming=self.warming,
        )
        if self._started is None:
            return state
        total = self._started.n_blocks
        used, running = round(self._last.kv_usage * total), min(self._last.running, len(self._live))
        return replace(
            self._adapters.add_to(state),
            running=running,
            waiting=len(self._live) - running,
            queued_prefill_tokens=sum(live.known_tokens for live in self._live.values() if not live.begun),
            kv_blocks_used=used,
            kv_blocks_cached=min(self._mirror.n_blocks, total - used),
            kv_blocks_total=total,
            max_request_tokens=self._max_request_tokens,
        )

    @property
    def _max_request_tokens(self) -> int:
        started = self._started
        assert started is not None
        return min(started.max_model_len, started.n_blocks * started.block_tokens or started.max_model_len)

    def cached_hashes(self) -> list[int]:
        """Wire hashes of all blocks in the prefix cache, parents before children."""
        return self._mirror.hashes()

    # -- life ------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Run until cancelled. Raises StartupError when the first start fails, because of the configuration.

        Raises GaveUpError when lost processes do not start again within the limit.
        """
        recovery = Recovery(self._recovery_limit_s, lambda: self.detail)
        try:
            try:
                await self._start()
            except CoreError as error:
                raise StartupError(f"vLLM did not start: {error}") from error
            while True:
                began = time.monotonic()
                await self._until_lost()
                await recovery.restart(self._start, CoreError, self._restart_failed, time.monotonic() - began)
        finally:
            for live in self._live.values():
                if live.task is not None:
                    live.task.cancel()
            await self._core.stop()

    async def _start(self) -> None:
        started = await self._core.start(self._mirror)
        check_task(self.model, started.tasks)
        log.info("vLLM is ready after %.1f s", sum(started.phases.values()))
        self._started = started
        self.facts = EngineFacts(
            started.vocab_size,
            started.hidden_size,
            self._max_request_tokens,
            started.phases,
            memory=MemoryAccount(),
        )
        self._last = CoreStep(time.monotonic(), 0, 0, 0.0, 0)
        self._life.on_started(self.facts)
        self.sleepless = "" if started.sleeps else _SLEEPLESS
        self._open()

    def _open(self) -> None:
        self._adapters.open()
        self._enter_serving()

    async def _until_lost(self) -> None:
        """Sleep and wake until a process of vLLM has ended or hangs; hand all requests off.

        After a loss while asleep it waits for the wake.
        """
        waking = asyncio.create_task(self._follow_wakes(), name="wakes")
        try:
            loss = await self._core.wait_lost()
        finally:
            waking.cancel()
        alive, self._live, self._started = self._live, {}, None
        self._adapters.close(asleep=self.phase == pb.PHASE_SLEEPING)
        self._suspects.reset()
        self._mirror.clear()
        self._dirty.clear()
        for live in alive.values():
            # vLLM does not say which waiting requests a step has begun, so that all its requests count as computed.
            in_flight = live.task is not None
            if live.task is not None:
                live.task.cancel()
            live.hand_off(pb.Handoff(reason=pb.Handoff.REASON_RANKS_LOST, detail=loss.detail, in_flight=in_flight))
        log.error("vLLM is lost: %s", loss.detail)
        self._life.on_lost(loss.cause, None)
        self._enter_lost(self._failure or loss.detail)
        self._failure = ""
        await self._core.stop()
        if self.phase == pb.PHASE_SLEEPING:
            await self._until_woken()

    async def _follow_wakes(self) -> None:
        """Wake vLLM whenever that is wanted, until a wake fails."""
        while True:
            await self._until_woken()
            try:
                await self._core.wake()
            except CoreError as error:
                self._give_up(f"the wake failed: {error}")
                return
            self._open()

    def _give_up(self, failure: str) -> None:
        """End processes that live but neither sleep nor wake; `_until_lost` goes on with the reason."""
        self._failure = failure
        self._core.kill()

    async def _give_back(self, level: int) -> None:
        self._mirror.clear()
        self._adapters.close(asleep=True)
        try:
            await self._core.sleep(level)
        except CoreError as error:
            self._give_up(f"the sleep failed: {error}")

    def _why_awake(self) -> str:
        return ""

    def _check_room(self, promised_bytes: int) -> None:
        """vLLM itself checks the memory of its GPUs."""

    def _on_phase(self, at: str) -> None:
        if self.phase in STARTING and at != self.detail:
            self._enter(self.phase, at, warming=at in WARMING)

    def pin_adapters(self, refs: Sequence[AdapterRef]) -> None:
        """Load these adapters, and keep them in their slots, in addition to those of the settings."""
        self._adapters.pin(refs)

    async def inspect_adapter(self, source: str) -> AdapterFacts:
        """Check that an adapter fits the model. Raises InvalidRequestError, UnsupportedError."""
        return await inspect(self._sources, source)

    # -- requests --------------------------------------------------------------------------------------------

    def submit(self, request: EngineRequest, sink: OutputSink) -> None:
        """Accept a request while there is no `refusal`; raises InvalidRequestError for what vLLM cannot compute.

        The KV of other workers, `request.pull`, is not fetched: vLLM computes it.
        """
        if self.phase != pb.PHASE_SERVING or self._started is None:
            raise NotServingError(self.detail)
        if request.embed == self.model.generates:
            raise InvalidRequestError("embed", _ONE_TASK[request.embed])
        check_length(request, self._max_request_tokens)
        core_request = CoreRequest(
            request.request_id,
            prompt_of(request),
            {} if request.embed else sampling_arguments(request, self._max_request_tokens),
            request.priority,
            request.cache_salt,
            task_of(self.model),
            request.second_from,
            request.adapter,
            images_of(request, self.model.images),
        )
        live = VllmRequest(request, sink, self._core.add(core_request))
        self._live[request] = live
        if request.trial_tokens:
            self._suspects.enter(request)
        else:
            self._begin(request)

    def progress(self, request: EngineRequest) -> Progress:
        """How far a request is. vLLM does not say which requests a step computes, so each step moves all of them."""
        signs = self._adapters.bytes_read(request)
        return Progress(self._live[request].computed_tokens, self._core.signs if signs is None else signs)

    async def read_blocks(self, request: pb.PullBlocksRequest) -> AsyncGenerator[pb.KvBlock, None]:
        """Raises BlocksUnavailableError: vLLM's blocks are not read by other workers."""
        raise BlocksUnavailableError(Unavailable.MISMATCH, "vLLM's KV blocks cannot be copied to other workers")
        yield pb.KvBlock()

    def _begin(self, request: EngineRequest) -> None:
        live = self._live[request]
        live.task = asyncio.create_task(self._follow(live), name=f"vllm {request.request_id}")
        live.task.add_done_callback(partial(self._ended, live))
        if request.trial_tokens:
            live.sink.announce_trial(request)
            live.sink.flush(self._step)

    async def _follow(self, live: VllmRequest) -> None:
        """Bring a request's adapter into a slot, then deliver its outputs until its end."""
        request, embed = live.request, live.request.embed
        try:
            async with self._adapters.in_use(request):
                async for output in live.stream:
                    if (result := live.embedding(output) if embed else live.tokens(output)) is not None:
                        self._deliver(live, result)
        except CoreError:
            return  # `_until_lost` hands all requests off
        except InvalidRequestError as error:
            self._refuse(live, error)
        except ReplayError as error:
            self._end(live, str(error), replays(request))
        except RequestFailedError as error:
            self._fail(live, str(error))
        finally:
            if request.trial_tokens:
                self._suspects.leave(request)

    def _ended(self, live: VllmRequest, task: asyncio.Task[None]) -> None:
        """Log an error of our own, and end its request."""
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("request %s: an output could not be read", live.request.request_id, exc_info=error)
            self._fail(live, repr(error))

    def _deliver(self, live: VllmRequest, output: Output) -> None:
        """Pass an output on. Tasks of one step run between `_on_step` and `_flush`."""
        request = live.request
        if output.prefill is not None:
            self._count_prefill(live, output.prefill.admitted_at)
        self.counters.generated_tokens += len(output.token_ids)
        self._rows += len(output.token_ids)
        live.sink.add(request, output)
        self._dirty.add(live.sink)
        if output.finish is not None:
            self._live.pop(request, None)
        if request.trial_tokens and live.generated_here >= request.trial_tokens:
            self._suspects.leave(request)

    def _count_prefill(self, live: VllmRequest, admitted_at: float) -> None:
        computed = live.known_tokens - live.cached_tokens
        self.counters.prefill_tokens += computed
        self.counters.prefix_hit_tokens += live.cached_tokens
        self._prefilled.append((computed, admitted_at))
        self._rows += computed
        now = time.monotonic()
        self._steps.on_first_output(admitted_at - live.queued_at, now - live.queued_at)

    def _fail(self, live: VllmRequest, message: str) -> None:
        """End a request that failed in vLLM: with an error if it has a grammar, else another worker continues it."""
        if live.request.sampling.grammar:
            self._end(live, message, "grammar")
        elif self._live.pop(live.request, None) is not None:
            live.hand_off(pb.Handoff(reason=pb.Handoff.REASON_FAILED, detail=message))
            self.changes.announce()

    def _refuse(self, live: VllmRequest, error: InvalidRequestError) -> None:
        """End a request whose adapter cannot be loaded, or whose images vLLM does not take."""
        if self._live.pop(live.request, None) is not None:
            live.sink.refuse(live.request, error)
            live.sink.flush(self._step)
            self.changes.announce()

    def _end(self, live: VllmRequest, message: str, field: str) -> None:
        """End a request with an error: the engine cannot obey `field` any further."""
        if self._live.pop(live.request, None) is not None:
            live.sink.add(live.request, Output(live.next_index, (), Finish.FAILED, failure=message, failed_field=field))
            live.sink.flush(self._step)
            self.changes.announce()

    @property
    def _n_waiting(self) -> int:
        return len(self._live) - self._last.running

    def _forget(self, request: EngineRequest) -> VllmRequest:
        live = self._live.pop(request)
        if live.task is not None:
            live.task.cancel()
        self._suspects.leave(request)
        return live

    # -- steps -----------------------------------------------------------------------------------------------

    def _on_step(self, step: CoreStep) -> None:
        """Called when the outputs of a step wait for their tasks, which run before `_flush`."""
        seconds = step.at - self._last.at
        asyncio.get_running_loop().call_soon(self._flush, seconds, self._last.running > 0)
        self.counters.preemptions += step.preemptions
        self._last = step

    def _flush(self, seconds: float, busy: bool) -> None:
        """End a step for all sinks, and learn from it unless vLLM was idle before."""
        self._step += 1
        for sink in self._dirty:
            sink.flush(self._step)
        self._dirty.clear()
        if self._prefilled:
            rows = sum(computed for computed, _ in self._prefilled)
            self._speeds.prefilled(rows, self._last.at - min(at for _, at in self._prefilled))
        elif busy:
            self._speeds.decoded(seconds)
        if busy or self._rows:
            self._steps.on_step(StepReport(seconds, self._rows, parts={}))
        self._prefilled.clear()
        self._rows = 0
        self.changes.announce()


_SLEEPLESS = 'vLLM sleeps on GPUs alone, with RYZANSTEIN_ENGINE_ARGS {"enable_sleep_mode": true}'
_ONE_TASK = {
    True: "vLLM serves this model for generation only; use a pool with the native engine for its embeddings",
    False: "vLLM serves this model for embeddings only",
}
