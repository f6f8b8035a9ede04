"""The native engine: one task owns the ranks, their scheduler, the requests, and restarts."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import replace

from ryzanstein.v1 import worker_pb2 as pb

from services.common.heap import trim
from services.common.lifecycle import StartupError
from services.common.recovery import Recovery
from services.common.tasks import end_tasks
from services.compute.backends.sizing import available_host_memory
from services.worker.adapters.slots import AdapterSlots, inspect
from services.worker.engine.base import Engine, LifeObserver, OutputSink, StepObserver, StepReport
from services.worker.engine.errors import InvalidRequestError, NotServingError
from services.worker.engine.kv_events import BlockPlace
from services.worker.engine.output import Output, Progress
from services.worker.engine.request import AdapterRef, EngineRequest
from services.worker.engine.state import AdapterFacts, EngineModel, EngineState
from services.worker.kv_transfer.device import BlockSizes, DeviceKv, block_sizes
from services.worker.kv_transfer.loader import BlockLoader
from services.worker.kv_transfer.neighbours import Neighbours
from services.worker.kv_transfer.opening import open_tiers
from services.worker.kv_transfer.tiers import Tiers
from services.worker.native.config import EngineConfig
from services.worker.native.live import LiveRequest
from services.worker.native.probe import probe_request
from services.worker.native.pump import StepPump
from services.worker.native.ranks import Ranks
from services.worker.native.startup import require_room_to_wake, scheduler_config
from services.worker.native.step_cost import LEAST_PROMPT_S, StepCost, StepTimer
from services.worker.process.failure import RanksFailedError
from services.worker.protocol.plan import StepPlan, StepResult
from services.worker.scheduling.request import Request
from services.worker.scheduling.scheduler import Scheduler
from services.worker.scheduling.step_builder import prompt_tokens

INTERNAL = "internal"  # cause of a loss after an error in the server's own state, with healthy ranks

log = logging.getLogger(__name__)


class NativeEngine(Engine):
    """An engine with our own ranks."""

    def __init__(
        self, config: EngineConfig, model: EngineModel, ranks: Ranks, steps: StepObserver, life: LifeObserver
    ) -> None:
        super().__init__(model, life, "loading the model")
        self._live: dict[EngineRequest, LiveRequest] = {}
        self._config, self._ranks, self._steps = config, ranks, steps
        self._tiers: Tiers | None = None  # places of KV blocks below the device, which outlive the ranks
        self._step_timer = StepTimer(LEAST_PROMPT_S[config.ranks.device], drafts=config.ranks.speculation)
        self._loader = BlockLoader(lambda: self._step_timer.prefill_tokens_per_s)
        self._neighbours = Neighbours(
            config.neighbours, lambda: self._device, lambda: self._tiers, self._loader, self.transfers
        )
        self._pump: StepPump | None = None  # pump of the ranks, which may be asleep
        self._probe: Request | None = None  # the start-up probe
        self._device: DeviceKv | None = None  # KV cache of the serving ranks
        self._adapters: AdapterSlots | None = None  # adapters of the serving ranks
        self._resident: Sequence[AdapterRef] = ()  # adapters that were in slots when the ranks fell asleep
        self._sizes = BlockSizes(pb.KvLayout())  # those on the ranks
        self._pinned: Sequence[AdapterRef] = ()  # in addition to those of the settings
        self._equipping: set[asyncio.Task[None]] = set()
        self._n_steps = 0
        ranks.on_warming = self._enter_warming

    def state(self) -> EngineState:
        """The current state; levels are 0 while no ranks serve."""
        step_timer, device, pump = self._step_timer, self._device, self._pump
        state = EngineState(
            self.phase,
            self.detail,
            prefill_tokens_per_s=step_timer.prefill_tokens_per_s,
            decode_step_ms=step_timer.decode_step_ms,
            computed_tokens=step_timer.computed_tokens,
            kv_bytes_per_token=device.bytes_per_token if device else 0,
            pull_bytes_per_s=self._neighbours.pull_bytes_per_s(device),
            standby_tokens=self._config.neighbours.copies.tokens if device and device.shared else 0,
            kv_places=self._tiers.states() if self._tiers else (),
            memory_bytes=self._ranks.held + self.transfers.places.host_bytes,
            promised_bytes=self._ranks.promised,
            memory=self.facts.memory.parts() if self.facts else {},
            wake_ms=self.wake_ms,
            warming=self.warming,
        )
        if pump is None:
            return state
        scheduler = pump.scheduler
        state = replace(state, max_request_tokens=scheduler.capacity.max_request_tokens)
        if device is None:  # asleep
            return state
        running = sum(request.begun for request in self._live.values())
        return replace(
            self._adapters.add_to(state) if self._adapters else state,
            running=running,
            waiting=len(self._live) - running,
            queued_prefill_tokens=scheduler.queued_prefill_tokens + prompt_tokens(scheduler.in_flight),
            kv_blocks_used=scheduler.pool.used,
            kv_blocks_cached=scheduler.pool.cached,
            kv_blocks_total=scheduler.pool.total,
        )

    def cached_hashes(self) -> list[int]:
        """Wire hashes of all blocks in the prefix cache, parents before children."""
        return self._pump.scheduler.pool.hashes() if self._pump else []

    def offloaded_hashes(self) -> Mapping[BlockPlace, list[int]]:
        """Wire hashes of the blocks in places below the device."""
        return self._tiers.hashes() if self._tiers else {}

    # -- ranks -----------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Run until cancelled. Raises StartupError when the first start fails, because of the configuration.

        Raises GaveUpError when lost ranks do not start again within the limit. A device may be gone, so the process
        has to end for its supervisor to start it elsewhere.
        """
        try:
            try:
                pump = await self._start()
            except RanksFailedError as error:
                raise StartupError(f"the ranks did not start: {error}") from error
            recovery = Recovery(self._config.recovery_limit_s, lambda: self.detail)
            while True:
                began = time.monotonic()
                await self._until_lost(pump)
                lived_s = time.monotonic() - began
                pump = await recovery.restart(self._start, RanksFailedError, self._restart_failed, lived_s)
        finally:
            await self._neighbours.close()
            if self._tiers is not None:
                await self._tiers.close()
            await self._ranks.stop()

    async def _start(self) -> StepPump:
        """Start the ranks and accept requests. Raises RanksFailedError, StartupError."""
        started = await self._ranks.start()
        log.info("%d ranks are ready after %.1f s", len(started.ranks), started.seconds)
        most, copy_s = self._config.max_batched_tokens, started.snapshot_s
        config = scheduler_config(self._config.ranks, started.n_blocks, most, copy_s)
        self._sizes = block_sizes(self.model.hash_root, self._config.ranks, started)
        self._tiers = self._tiers or open_tiers(self._config.tiers, self._sizes, self, self._loader)
        scheduler = Scheduler(config, self.kv_events, self.counters, places=self._tiers)
        pump = self._pump = StepPump(
            scheduler,
            self._step_timer,
            self._config.prefill_step_s,
            self._ranks.submit,
            self._planned,
            self._computed,
            self.changes.announce,
        )
        self.facts, self._ranks.on_result = self._config.facts(started), pump.on_result
        self._life.on_started(self.facts)
        self._open(pump, self.facts.vocab_size)
        return pump

    def _open(self, pump: StepPump, vocab_size: int) -> None:
        """Accept requests for ranks that have started or woken, with the adapters that were resident before."""
        scheduler = pump.scheduler
        self._device = DeviceKv(pump, self._ranks, self._sizes)
        if self._tiers is not None:
            self._tiers.attach(self._device)
        self._adapters = AdapterSlots(
            self._config.adapters,
            self._ranks.load_adapter,
            self._steps,
            self.counters,
            self.changes.announce,
            # As much as the prompt tokens that the ranks would have computed meanwhile.
            lambda tenant, s: scheduler.ledger.charge_load(tenant, s * self._step_timer.prefill_tokens_per_s),
        )
        self._adapters.pin((*self._config.pinned, *self._pinned))
        self._adapters.restore(self._resident)
        self._resident = ()
        self._enter_serving()
        if not self._step_timer.decode_step_ms and (
            probe := probe_request(scheduler, vocab_size, embeds=not self.model.generates)
        ):
            self._probe = probe
            scheduler.submit(probe)
            pump.kick()

    async def _until_lost(self, pump: StepPump) -> None:
        """Serve, sleep and wake until the ranks are lost or the scheduler fails; hand all requests off.

        After a loss while asleep it waits for the wake. Logs the cause when it is known.
        """
        lost, waking = asyncio.create_task(self._ranks.wait_lost()), asyncio.create_task(self._follow_wakes(pump))
        try:
            await asyncio.wait((lost, pump.broken, waking), return_when=asyncio.FIRST_COMPLETED)
            if waking.done():
                waking.result()  # raises an unexpected error, after which no wake would come
            internal = pump.broken.done()
            reason = pump.broken.result() if internal else await lost
        finally:
            lost.cancel()
            await end_tasks([waking])
        self._close()
        self._ranks.on_result = self._pump = None
        pump.stop(reason)
        alive, self._live = self._live, {}
        for request in alive.values():
            in_flight = request.n_in_flight > 0
            request.hand_off(pb.Handoff(reason=pb.Handoff.REASON_RANKS_LOST, detail=reason, in_flight=in_flight))
        pump.scheduler.abandon()
        self._enter_lost(reason)
        failure = None if internal else await self._ranks.wait_failed()
        log.error("ranks lost: %s", failure or reason)
        if failure is None:
            self._life.on_lost(INTERNAL, None)
        else:
            self._life.on_lost(failure.kind.value, failure.rank)
        if self.phase == pb.PHASE_SLEEPING:
            self._enter_lost(str(failure or reason))
            await self._ranks.stop()  # frees what the ranks share with this process
            self.changes.announce()
            await self._until_woken()
        else:
            self._enter_lost(str(failure or reason))

    def _close(self) -> None:
        """Forget the ranks' adapters and KV cache."""
        if self._adapters is not None:
            self._adapters.abandon()
        for task in self._equipping:
            task.cancel()
        self._device = self._adapters = None
        if self._tiers is not None:
            self._tiers.detach()

    # -- sleep -----------------------------------------------------------------------------------------------

    def _why_awake(self) -> str:
        transfers = len(self._pump.scheduler.transfers) if self._pump else 0
        return f"{transfers} transfers of KV blocks from or to other workers" if transfers else ""

    async def _give_back(self, level: int) -> None:
        """Clear the prefix cache once the last plans are computed, then order the ranks to sleep."""
        pump = self._pump
        assert pump is not None
        assert self._adapters is not None
        self._resident = self._adapters.resident()
        self._close()
        if self._probe is not None:
            pump.scheduler.cancel(self._probe)
        try:
            with self.changes.watch() as changed:
                while pump is self._pump and not pump.scheduler.idle:
                    await changed.wait()
                    changed.clear()
            if pump is self._pump:
                pump.scheduler.abandon()
                if self._tiers is not None:
                    self._tiers.sleep()
                self.changes.announce()
                await self._ranks.sleep(level)
        except RanksFailedError as error:
            log.warning("the ranks are lost while they fall asleep: %s", error)
        trim()
        self.changes.announce()

    def _check_room(self, promised_bytes: int) -> None:
        if self._config.ranks.device != "cpu":
            return  # a rank finds out when it brings the weights back to its GPU
        assert self.facts is not None, "a worker that sleeps has served"
        held, available = self.state().memory_bytes, available_host_memory()
        require_room_to_wake(self.facts.memory, held, available, promised_bytes)

    async def _follow_wakes(self, pump: StepPump) -> None:
        """Wake the ranks whenever that is wanted, until they are lost."""
        while True:
            await self._until_woken()
            try:
                await self._ranks.wake()
            except RanksFailedError:
                return  # `_until_lost` knows
            assert self.facts is not None
            self._open(pump, self.facts.vocab_size)

    # -- requests --------------------------------------------------------------------------------------------

    def submit(self, request: EngineRequest, sink: OutputSink) -> None:
        """Accept a request while there is no `refusal`, and fetch its KV from its `pull`; raises TooLongError."""
        if self.phase != pb.PHASE_SERVING or self._pump is None or self._device is None:
            raise NotServingError(self.detail)
        live = LiveRequest.of(request, sink, self.model.hash_root, self.model.images)
        self._pump.scheduler.submit(live, deferred=live.pull is not None or request.adapter is not None)
        self._live[request] = live
        self._pump.kick()
        self._neighbours.copies.follow(live, request.standby, self._device)
        if request.adapter is not None:
            task = asyncio.create_task(self._equip(live, request.adapter))
            self._equipping.add(task)
            task.add_done_callback(self._equipping.discard)
        elif live.pull is not None:
            self._neighbours.pull(self._device, live, live.pull)

    async def _equip(self, live: LiveRequest, ref: AdapterRef) -> None:
        """Bring a deferred request's adapter into a slot, then let the request go on. No other request waits for it."""
        slots, device, request = self._adapters, self._device, live.request
        assert slots is not None
        assert device is not None
        try:
            slot = await slots.take(ref, request.tenant)
        except InvalidRequestError as error:
            if self._live.get(request) is live:
                self._forget(request)
                live.sink.refuse(request, error)
                live.sink.flush(0)
                self.changes.announce()
            return
        except RanksFailedError:
            return  # with the ranks' other requests it is handed off
        if self._live.get(request) is not live:
            slots.give_back(ref.digest)
            return
        live.adapter, live.held = slot, slots
        self._neighbours.pull(device, live, live.pull)

    def pin_adapters(self, refs: Sequence[AdapterRef]) -> None:
        """Load these adapters, and keep them in their slots, in addition to those of the settings."""
        if refs != self._pinned:
            self._pinned = refs
            if self._adapters is not None:
                self._adapters.pin((*self._config.pinned, *refs))

    async def inspect_adapter(self, source: str) -> AdapterFacts:
        """Check that an adapter fits the model. Raises InvalidRequestError, UnsupportedError."""
        return await inspect(self._config.adapters, source)

    def progress(self, request: EngineRequest) -> Progress:
        """How far a request is. A step moves the requests in it, and those that wait until it is their turn."""
        live, adapter = self._live[request], request.adapter
        if adapter is not None and live.held is None and self._adapters is not None:
            signs = self._adapters.bytes_read(adapter.digest)
        else:
            signs = self._loader.blocks_received(live)
        return Progress(live.n_written, self._n_steps + self._ranks.signs if signs is None else signs)

    def read_blocks(self, request: pb.PullBlocksRequest) -> AsyncGenerator[pb.KvBlock, None]:
        """The requested KV blocks, up to the first block that is not cached. Raises BlocksUnavailableError."""
        return self._neighbours.source.read(request)

    def take_copies(self, messages: AsyncIterator[pb.CopyBlocksRequest]) -> AsyncGenerator[pb.CopyBlocksResponse, None]:
        """Keep copies of another worker's running request, as a standby. Raises BlocksUnavailableError."""
        return self._neighbours.standby.take(messages)

    async def _hand_over(self) -> None:
        await self._neighbours.copies.finish()

    @property
    def _n_waiting(self) -> int:
        return self._pump.scheduler.n_waiting if self._pump else 0

    def _forget(self, request: EngineRequest) -> LiveRequest:
        assert self._pump is not None
        live = self._live.pop(request)
        self._pump.scheduler.cancel(live)
        live.give_back()
        self._pump.kick()
        return live

    # -- steps -----------------------------------------------------------------------------------------------

    def _planned(self, plan: StepPlan) -> None:
        assert self._pump is not None
        suspect = self._pump.scheduler.quarantine.begun()
        if isinstance(suspect, LiveRequest) and suspect.request in self._live:
            suspect.sink.announce_trial(suspect.request)
            suspect.sink.flush(plan.step)

    def _computed(self, result: StepResult, outputs: list[tuple[Request, Output]], cost: StepCost, now: float) -> None:
        """Deliver a step's outputs to the requests' sinks."""
        self._n_steps += 1
        sinks = set()
        for live, output in outputs:
            if not isinstance(live, LiveRequest):
                if output.failure:
                    log.error("the start-up probe failed: %s", output.failure)
                continue
            if output.prefill is not None:
                self._steps.on_first_output(live.admitted_at - live.queued_at, now - live.queued_at)
                self.transfers.began(live.request.attempt, live.n_prompt, live.cached_tokens)
            live.sink.add(live.request, output)
            sinks.add(live.sink)
            if output.finish is not None:
                del self._live[live.request]
                live.give_back()
        for sink in sinks:
            sink.flush(result.step)
        self._steps.on_step(StepReport(cost.seconds, cost.n_rows, result.times.parts()))
