"""The engine of a worker: one task that owns the ranks, their scheduler, the requests, and every restart."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass

from ryzanstein.v1 import worker_pb2 as pb

from services.common.lifecycle import GaveUpError, StartupError
from services.worker.engine.base import LifeObserver, Ranks, RunningRequest, StepObserver
from services.worker.engine.changes import Changes
from services.worker.engine.probe import probe_request
from services.worker.engine.pump import StepPump
from services.worker.engine.step_cost import Meter, StepCost
from services.worker.kv_transfer.puller import Puller
from services.worker.kv_transfer.store import KvStore, kv_layout
from services.worker.process.failure import RanksFailedError
from services.worker.process.rank_group import GroupStarted, RankGroupConfig
from services.worker.protocol.plan import StepPlan, StepResult
from services.worker.scheduling.config import SchedulerConfig, SchedulerCounters
from services.worker.scheduling.kv_events import KvEventLog
from services.worker.scheduling.request import Output, Request
from services.worker.scheduling.scheduler import Scheduler

FIRST_BACKOFF_S = 0.25
MAX_BACKOFF_S = 30.0
STABLE_S = 60.0  # ranks that lived this long start the back-off anew

_REFUSALS = {
    pb.PHASE_LOADING: pb.Handoff(reason=pb.Handoff.REASON_LOADING, detail="the worker is still loading its model"),
    # Not RANKS_LOST: this request was not touched by the loss and says nothing about its cause.
    pb.PHASE_RECOVERING: pb.Handoff(reason=pb.Handoff.REASON_LOADING, detail="the worker is restarting its ranks"),
    pb.PHASE_DRAINING: pb.Handoff(reason=pb.Handoff.REASON_DRAIN, detail="the worker is draining"),
}

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What the loop is told once."""

    ranks: RankGroupConfig
    hash_root: str  # of KV blocks
    max_waiting: int  # requests beyond it are handed off
    max_batched_tokens: int
    prefill_step_s: float  # by which prompts may lengthen a step of decodes
    recovery_limit_s: float = 0.0  # how long lost ranks are started again and again; 0: for ever

    def scheduler(self, started: GroupStarted) -> SchedulerConfig:
        """How much may be planned for ranks that have started."""
        return SchedulerConfig(
            n_blocks=started.n_blocks,
            block_tokens=self.ranks.block_size,
            max_model_len=self.ranks.max_model_len,
            max_running=self.ranks.max_slots,
            max_batched_tokens=max(self.max_batched_tokens, self.ranks.max_slots),
            max_in_flight=self.ranks.depth,
        )


class EngineLoop:
    """What this worker does right now. Lives on the event loop; others read it, ask it, and watch `changes`."""

    def __init__(
        self, config: EngineConfig, ranks: Ranks, puller: Puller, steps: StepObserver, life: LifeObserver
    ) -> None:
        self.config, self.puller = config, puller
        self._ranks, self._steps, self._life = ranks, steps, life
        self.phase: pb.Phase = pb.PHASE_LOADING
        self.detail = "loading the model"
        self.changes = Changes()
        self.kv_log = KvEventLog()
        self.counters = SchedulerCounters()
        self.meter = Meter()
        self.started: GroupStarted | None = None  # what the ranks said when they were ready the last time
        self.store: KvStore | None = None  # the KV cache of the ranks that serve, with its scheduler
        self._pump: StepPump | None = None  # of the ranks that serve
        self._running: dict[Request, RunningRequest] = {}

    @property
    def serving(self) -> bool:
        """Whether requests are taken on."""
        return self.phase == pb.PHASE_SERVING

    @property
    def phase_name(self) -> str:
        """The phase in lower case, for people and leases."""
        return pb.Phase.Name(self.phase).removeprefix("PHASE_").lower()

    @property
    def scheduler(self) -> Scheduler | None:
        """Of the ranks that serve; to be read only."""
        return self._pump.scheduler if self._pump else None

    @property
    def load(self) -> tuple[int, int]:
        """How many requests are computed, and how many wait for that; the probe is nobody's."""
        computed = sum(request.slot >= 0 for request in self._running)
        return computed, len(self._running) - computed

    # -- ranks -----------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Until cancelled. Raises StartupError when the very first start fails: a configuration to be corrected.

        Raises GaveUpError when lost ranks do not come back within the limit: where a device is gone, the process itself
        must go, so that whoever supervises it can start it elsewhere.
        """
        try:
            try:
                pump = await self._start()
            except RanksFailedError as error:
                raise StartupError(f"the ranks did not start: {error}") from error
            backoff = FIRST_BACKOFF_S
            while True:
                began = time.monotonic()
                await self._until_lost(pump)
                if time.monotonic() - began > STABLE_S:
                    backoff = FIRST_BACKOFF_S
                pump, backoff = await self._recover(backoff)
        finally:
            await self._ranks.stop()

    async def _start(self) -> StepPump:
        """Start the ranks and take requests. Raises RanksFailedError."""
        started = await self._ranks.start()
        log.info("%d ranks are ready after %.1f s", len(started.ranks), started.seconds)
        scheduler = Scheduler(self.config.scheduler(started), self.kv_log, self.counters)
        pump = self._pump = StepPump(
            scheduler,
            self.meter,
            self.config.prefill_step_s,
            self._ranks.submit,
            self._planned,
            self._computed,
            self.changes.announce,
        )
        self.store = KvStore(pump, self._ranks, kv_layout(self.config.hash_root, self.config.ranks, started))
        self.started, self._ranks.on_result = started, pump.on_result
        self._life.started(started)
        self._enter(pb.PHASE_SERVING, "")
        if not self.meter.decode_step_ms and (probe := probe_request(scheduler, started.model.vocab_size)):
            scheduler.submit(probe)
            pump.kick()
        return pump

    async def _until_lost(self, pump: StepPump) -> None:
        """Hand everything off as soon as ranks or books are lost; say why once it is known."""
        lost = asyncio.create_task(self._ranks.wait_lost())
        try:
            await asyncio.wait((lost, pump.broken), return_when=asyncio.FIRST_COMPLETED)
            internal = pump.broken.done()
            reason = pump.broken.result() if internal else lost.result()
        finally:
            lost.cancel()
        self._ranks.on_result = self._pump = self.store = None
        pump.stop(reason)
        alive, self._running = self._running, {}
        for request, running in alive.items():
            handoff = pb.Handoff(reason=pb.Handoff.REASON_RANKS_LOST, detail=reason, in_flight=request.n_in_flight > 0)
            self.hand_off(running, handoff)
        pump.scheduler.abandon()
        self._enter(pb.PHASE_RECOVERING, reason)
        failure = None if internal else await self._ranks.wait_failed()
        log.error("ranks lost: %s", failure or reason)
        self._life.lost(failure)
        self._enter(pb.PHASE_RECOVERING, str(failure or reason))

    async def _recover(self, backoff: float) -> tuple[StepPump, float]:
        """Start again within the limit; returns the back-off for the next loss as well."""
        limit = asyncio.timeout(self.config.recovery_limit_s or None)
        try:
            async with limit:
                while True:
                    await asyncio.sleep(backoff)
                    backoff = min(backoff * 2, MAX_BACKOFF_S)
                    try:
                        return await self._start(), backoff
                    except RanksFailedError as error:
                        log.error("restart failed, next try in %.1f s: %s", backoff, error)
                        self._enter(pb.PHASE_RECOVERING, str(error))
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise GaveUpError(
                f"not serving for {self.config.recovery_limit_s:g} s (RYZANSTEIN_RECOVERY_LIMIT_S): {self.detail}"
            ) from error

    def _enter(self, phase: pb.Phase, detail: str) -> None:
        if self.phase == pb.PHASE_DRAINING:  # there is no way back: the process is about to end
            phase = pb.PHASE_DRAINING
        self.phase, self.detail = phase, detail
        log.info("phase %s", self.phase_name, extra={"detail": detail})
        self.changes.announce()

    async def drain(self, grace_s: float) -> tuple[int, int]:
        """Take nothing new, let running requests go on for `grace_s`; returns how many were handed off, completed."""
        self._enter(pb.PHASE_DRAINING, "draining")
        self._life.drains()
        handed_off = self._release(waiting_only=grace_s > 0)
        running = len(self._running)
        with self.changes.watch() as changed:
            try:
                async with asyncio.timeout(grace_s):
                    while self._running:
                        await changed.wait()
                        changed.clear()
            except TimeoutError:
                log.info("the grace period is over")
        left = self._release()
        return handed_off + left, running - left

    # -- requests --------------------------------------------------------------------------------------------

    def refusal(self) -> pb.Handoff | None:
        """Why a new request had better go elsewhere now; None when it need not."""
        if not self.serving or self._pump is None:
            return _REFUSALS[self.phase]
        if self._pump.scheduler.n_waiting >= self.config.max_waiting:
            detail = f"{self.config.max_waiting} requests are waiting"
            return pb.Handoff(reason=pb.Handoff.REASON_OVERLOAD, detail=detail)
        return None

    def submit(self, request: Request, running: RunningRequest, hint: pb.PullHint | None) -> None:
        """Take a request on that `refusal` had nothing against; raises TooLongError.

        `hint`: another worker holds more of the prompt's KV, which is fetched first.
        """
        assert self._pump is not None
        assert self.store is not None
        pull = hint is not None and request.reads_cache
        self._pump.scheduler.submit(request, deferred=pull)
        self._running[request] = running
        self._pump.kick()
        if hint is not None and pull:
            self.puller.start(self.store, request, hint, self.meter.prefill_tokens_per_s)

    def cancel(self, request: Request) -> None:
        """Forget a request; its gateway hears nothing more of it."""
        if request in self._running:
            self._forget(request).close("cancelled")

    def hand_off(self, running: RunningRequest, handoff: pb.Handoff) -> None:
        """Leave a request to another worker."""
        self._life.handed_off(handoff.reason)
        running.stream.hand_off(running, handoff)
        running.stream.flush(0)

    def _release(self, *, waiting_only: bool = False) -> int:
        chosen = [request for request in self._running if not (waiting_only and request.slot >= 0)]
        for request in chosen:
            self.hand_off(self._forget(request), _REFUSALS[pb.PHASE_DRAINING])
        return len(chosen)

    def _forget(self, request: Request) -> RunningRequest:
        assert self._pump is not None
        running = self._running.pop(request)
        self._pump.scheduler.cancel(request)
        self._pump.kick()
        return running

    # -- steps -----------------------------------------------------------------------------------------------

    def _planned(self, plan: StepPlan) -> None:
        assert self._pump is not None
        suspect = self._pump.scheduler.trial.begun()
        if suspect is not None and (running := self._running.get(suspect)) is not None:
            running.stream.announce_trial(running)
            running.stream.flush(plan.step)

    def _computed(self, result: StepResult, outputs: list[Output], cost: StepCost, now: float) -> None:
        """Tell those who wait what a step has brought."""
        streams = set()
        for output in outputs:
            running = self._running.get(output.request)
            if running is None:
                continue
            if output.first:
                self._steps.first_output(output.request, now)
                running.span.add_event("first output", {"cached_tokens": output.request.cached_tokens})
            running.stream.add(running, output)
            streams.add(running.stream)
            if output.finish is not None:
                del self._running[output.request]
        for stream in streams:
            stream.flush(result.step)
        self._steps.step(result, cost)
