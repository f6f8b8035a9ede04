"""The interface of engines, for the API in front of it and for observers."""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ryzanstein.v1 import worker_pb2 as pb

from services.common.phases import phase_name
from services.worker.engine.changes import Changes
from services.worker.engine.errors import (
    BlocksUnavailableError,
    InvalidRequestError,
    PhaseRefusedError,
    Unavailable,
    UnsupportedError,
)
from services.worker.engine.kv_events import BlockPlace, KvEventLog
from services.worker.engine.lifecycle import STARTING, Lifecycle
from services.worker.engine.output import Finish, Output, Progress
from services.worker.engine.request import AdapterRef, EngineRequest
from services.worker.engine.state import (
    AdapterFacts,
    EngineCounters,
    EngineFacts,
    EngineModel,
    EngineState,
    TransferTotals,
)

__all__ = ["Engine", "EngineRequest", "EngineState", "Finish", "Output", "OutputSink", "StepReport"]


log = logging.getLogger(__name__)

MAX_WAITING = 1024  # requests; further ones are handed off
# Why an engine that does not serve leaves a request to another worker, by its phase.
_REFUSALS = {
    pb.PHASE_LOADING: pb.Handoff(reason=pb.Handoff.REASON_LOADING, detail="the worker is still loading its model"),
    # Not RANKS_LOST: the lost ranks did not compute this request, so it is no suspect.
    pb.PHASE_RECOVERING: pb.Handoff(reason=pb.Handoff.REASON_LOADING, detail="the worker is restarting its ranks"),
    pb.PHASE_SLEEPING: pb.Handoff(reason=pb.Handoff.REASON_LOADING, detail="the worker is asleep"),
    pb.PHASE_WAKING: pb.Handoff(reason=pb.Handoff.REASON_LOADING, detail="the worker is waking"),
    pb.PHASE_DRAINING: pb.Handoff(reason=pb.Handoff.REASON_DRAIN, detail="the worker is draining"),
}


class OutputSink(Protocol):
    """Receives the outputs of requests. A sink may serve many requests; `flush` ends a step for all of them."""

    def add(self, request: EngineRequest, output: Output) -> None:
        """Take a step's output of a request."""

    def announce_trial(self, request: EngineRequest) -> None:
        """Called when the first plan with a suspect is sent to the ranks."""

    def hand_off(self, request: EngineRequest, handoff: pb.Handoff) -> None:
        """End the request here; another worker continues it."""

    def refuse(self, request: EngineRequest, error: InvalidRequestError) -> None:
        """End a request that no worker can serve."""

    def flush(self, step: int) -> None:
        """A step is complete."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """One finished step."""

    seconds: float
    n_rows: int
    parts: Mapping[str, float]  # seconds: wait, forward, communication, sample; empty: not measured


class StepObserver(Protocol):
    """Callbacks for every step and every first output."""

    def on_step(self, report: StepReport) -> None:
        """A step is complete."""

    def on_first_output(self, queue_s: float, total_s: float) -> None:
        """A request got its first output `total_s` after its submit; `queue_s` of that it waited for admission."""

    def on_adapter_load(self, source: str, result: str, seconds: float) -> None:
        """An adapter was loaded from `files` or `memory`; the result is ok, refused, or lost with the ranks."""


class LifeObserver(Protocol):
    """Callbacks for an engine's start, the loss of its ranks, and its drain."""

    def on_started(self, facts: EngineFacts) -> None:
        """The engine has started."""

    def on_lost(self, cause: str, rank: int | None) -> None:
        """The ranks are lost; `rank` is the rank to blame, or None."""

    def on_woken(self, seconds: float) -> None:
        """The engine has woken, `seconds` after the order to."""

    def on_drain(self) -> None:
        """The engine refuses new requests from now on."""


class Live(Protocol):
    """An engine's state of a request that has not ended."""

    @property
    def begun(self) -> bool:
        """Whether the engine computes it; otherwise it waits."""

    def hand_off(self, handoff: pb.Handoff) -> None:
        """End it here; another worker continues it."""


class Engine(ABC):
    """Serves one model as a virtual worker; a process can hold several. All methods run on the event loop.

    The base has what engines share: phase, totals, refusals, sleep and wake, and the drain.
    """

    sleepless = ""  # why the engine cannot sleep; empty: it can
    _live: Mapping[EngineRequest, Live]  # requests that have not ended

    def __init__(self, model: EngineModel, life: LifeObserver, detail: str) -> None:
        """`detail`: message for people while the engine loads."""
        self.model = model
        self.facts: EngineFacts | None = None  # None before the first start
        self.changes = Changes()  # announces changes of the state and the KV events
        self._lifecycle = Lifecycle(detail, self.changes.announce)
        self._enter = self._lifecycle.enter
        self.kv_events = KvEventLog()  # changes of the prefix cache
        self.counters = EngineCounters()
        self.transfers = TransferTotals()
        self._life = life
        self._slept: asyncio.Future[None] | None = None  # done once the memory of the last sleep is given back
        self._wake_wanted = asyncio.Event()  # until the engine has begun to wake
        self._wake_began = 0.0
        self.wake_ms = 0  # time of the last wake, from asleep to serving; 0: not measured

    @property
    def phase(self) -> pb.Phase:
        """The phase; requests are accepted while it is SERVING."""
        return self._lifecycle.phase

    @property
    def detail(self) -> str:
        """Message for people: why the phase is not SERVING."""
        return self._lifecycle.detail

    @property
    def warming(self) -> bool:
        """Whether a start or a wake has loaded the weights, and computes first steps."""
        return self._lifecycle.warming

    @abstractmethod
    async def run(self) -> None:
        """Start, serve and recover until cancelled, then end all processes of the engine.

        Raises StartupError when the first start fails, because of the configuration, GaveUpError when a later start
        takes too long: a device may be gone, so the process has to end for its supervisor to start it elsewhere.
        """

    @abstractmethod
    def state(self) -> EngineState:
        """The current state; levels are 0 while nothing serves."""

    @abstractmethod
    def cached_hashes(self) -> list[int]:
        """Wire hashes of all blocks in the prefix cache, parents before children."""

    def offloaded_hashes(self) -> Mapping[BlockPlace, list[int]]:
        """Wire hashes of the blocks in places below the device, parents before children."""
        return {}

    @abstractmethod
    def submit(self, request: EngineRequest, sink: OutputSink) -> None:
        """Accept a request while there is no `refusal`. Raises InvalidRequestError for a request it can never serve.

        The sink gets its outputs, the last with the finish reason, or a handoff.
        """

    @abstractmethod
    def progress(self, request: EngineRequest) -> Progress:
        """How far a request that is alive is. It must not change while nothing works for the request."""

    @abstractmethod
    def pin_adapters(self, refs: Sequence[AdapterRef]) -> None:
        """Load these adapters, and keep them loaded; those of the last call need not stay any longer."""

    @abstractmethod
    async def inspect_adapter(self, source: str) -> AdapterFacts:
        """Check that an adapter fits the model. Raises InvalidRequestError, UnsupportedError without room for any."""

    @abstractmethod
    def read_blocks(self, request: pb.PullBlocksRequest) -> AsyncGenerator[pb.KvBlock, None]:
        """The requested KV blocks, up to the first block that is not cached. Raises BlocksUnavailableError."""

    def take_copies(self, messages: AsyncIterator[pb.CopyBlocksRequest]) -> AsyncGenerator[pb.CopyBlocksResponse, None]:
        """Keep copies of another worker's running request, as a standby. Raises BlocksUnavailableError."""
        raise BlocksUnavailableError(Unavailable.MISMATCH, "this engine takes no copies of KV blocks")

    async def _hand_over(self) -> None:  # noqa: B027  # most engines have no standbys
        """Give the standbys of running requests what they lack, for a limited time."""

    @property
    @abstractmethod
    def _n_waiting(self) -> int:
        """Number of requests that have not begun, while the engine serves."""

    @abstractmethod
    def _forget(self, request: EngineRequest) -> Live:
        """Remove a request that is alive, and stop its computation."""

    @abstractmethod
    async def _give_back(self, level: int) -> None:
        """Give the model's memory back, after the announcement that the prefix cache is cleared. Raises nothing."""

    @abstractmethod
    def _why_awake(self) -> str:
        """What, besides requests, must not be interrupted by a sleep now; empty: nothing."""

    @abstractmethod
    def _check_room(self, promised_bytes: int) -> None:
        """Raise NoRoomError if memory does not suffice to wake, without what other workers have yet to take."""

    async def sleep(self, level: int) -> None:
        """Give the model's memory back; does nothing while asleep. Level 2 keeps no copies of the weights.

        Raises PhaseRefusedError while requests run or wait and in other phases, UnsupportedError if it cannot sleep.
        """
        if self.phase == pb.PHASE_SLEEPING and self._slept is not None:
            await asyncio.shield(self._slept)
            return
        if self.sleepless:
            raise UnsupportedError(self.sleepless)
        if self.phase != pb.PHASE_SERVING:
            raise PhaseRefusedError(f"the worker is {phase_name(self.phase)}: {self.detail}")
        if busy := f"{len(self._live)} requests run or wait" if self._live else self._why_awake():
            raise PhaseRefusedError(busy)
        self._enter(pb.PHASE_SLEEPING, "asleep")
        self._slept = asyncio.create_task(self._give_back(level), name="sleep")
        await asyncio.shield(self._slept)

    def wake(self, promised_bytes: int = 0) -> None:
        """Begin to wake; does nothing while waking or serving.

        `promised_bytes`: memory that other workers of the machine have yet to take. Raises PhaseRefusedError in other
        phases, NoRoomError.
        """
        if self.phase in {pb.PHASE_SERVING, pb.PHASE_WAKING}:
            return
        if self.phase != pb.PHASE_SLEEPING:
            raise PhaseRefusedError(f"the worker is {phase_name(self.phase)}: {self.detail}")
        self._check_room(promised_bytes)
        self._wake_began = time.monotonic()
        self._enter(pb.PHASE_WAKING, "waking")
        self._wake_wanted.set()

    async def _until_woken(self) -> None:
        """Wait until a wake is wanted and the sleep before it has ended."""
        await self._wake_wanted.wait()
        self._wake_wanted.clear()
        if self._slept is not None:
            await asyncio.wait([self._slept])

    def _enter_serving(self) -> None:
        """Accept requests; a wake is over, and measured."""
        if self.phase == pb.PHASE_WAKING:
            seconds = time.monotonic() - self._wake_began
            self.wake_ms = max(1, round(seconds * 1e3))
            self._life.on_woken(seconds)
        self._wake_wanted.clear()
        self._enter(pb.PHASE_SERVING, "")

    def _enter_warming(self) -> None:
        """A start or a wake has loaded the weights, and computes first steps."""
        if self.phase in STARTING:  # a restart keeps its reason as the detail
            detail = self.detail if self.phase == pb.PHASE_RECOVERING else "warming up"
            self._enter(self.phase, detail, warming=True)

    def _enter_lost(self, reason: str) -> None:
        """The processes are lost: they start again at once, or with the wake if the engine is asleep."""
        if self.phase == pb.PHASE_SLEEPING:
            self._enter(pb.PHASE_SLEEPING, f"asleep; lost meanwhile, and started again by the wake: {reason}")
        else:
            self._enter(pb.PHASE_RECOVERING, reason)

    def refusal(self) -> pb.Handoff | None:
        """Why a new request should go to another worker now; None while the engine accepts requests."""
        if self.phase != pb.PHASE_SERVING:
            return _REFUSALS[self.phase]
        if self._n_waiting >= MAX_WAITING:
            return pb.Handoff(reason=pb.Handoff.REASON_OVERLOAD, detail=f"{MAX_WAITING} requests are waiting")
        return None

    def cancel(self, request: EngineRequest) -> None:
        """End a request that is alive; its sink gets no more outputs of it."""
        if request in self._live:
            self._forget(request)

    async def drain(self, grace_s: float) -> tuple[int, int]:
        """Refuse new requests, hand waiting ones off, run the others for `grace_s`, then hand these off.

        Returns the numbers handed off and completed.
        """
        self._enter(pb.PHASE_DRAINING, "draining")
        self._life.on_drain()
        handed_off = self._release(waiting_only=True)
        running = len(self._live)
        with self.changes.watch() as changed:
            try:
                async with asyncio.timeout(grace_s):
                    while self._live:
                        await changed.wait()
                        changed.clear()
            except TimeoutError:
                log.info("the grace period is over")
        await self._hand_over()
        left = self._release(waiting_only=False)
        return handed_off + left, running - left

    def _release(self, *, waiting_only: bool) -> int:
        """Hand requests off, all or those that have not begun; returns their number."""
        chosen = [request for request, live in self._live.items() if not (waiting_only and live.begun)]
        for request in chosen:
            self._forget(request).hand_off(_REFUSALS[pb.PHASE_DRAINING])
        return len(chosen)

    def _restart_failed(self, error: Exception) -> None:
        self._enter(pb.PHASE_RECOVERING, str(error))
