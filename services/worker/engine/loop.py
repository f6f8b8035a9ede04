"""Keeps the ranks busy: plans go out as soon as there is room, results become outputs of requests."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol

from services.worker.api.stream_buffer import RunningRequest, StreamBuffer
from services.worker.engine.step_cost import Meter, StepCost
from services.worker.process.failure import RanksFailedError
from services.worker.protocol.plan import StepPlan, StepResult
from services.worker.scheduling.request import Output, Request
from services.worker.scheduling.scheduler import Scheduler
from services.worker.scheduling.transfers import Arrival, Pin

IDLE_CHECK_S = 1.0  # after the last step; once for every time the engine falls idle

log = logging.getLogger(__name__)


class StepObserver(Protocol):
    """Hears of every step and every first token."""

    def step(self, result: StepResult, cost: StepCost) -> None:
        """A step is complete."""
        ...

    def first_output(self, request: Request, now: float) -> None:
        """A request got its first output."""
        ...


class Engine:
    """One generation of ranks and its requests. Everything happens in callbacks of the event loop; nothing polls."""

    def __init__(
        self,
        scheduler: Scheduler,
        meter: Meter,
        submit_plan: Callable[[StepPlan], None],
        observer: StepObserver,
        changed: Callable[[], None],
        prefill_step_s: float,
    ) -> None:
        self.scheduler = scheduler
        self._meter = meter
        self._submit_plan = submit_plan
        self._observer = observer
        self._changed = changed
        self._prefill_step_s = prefill_step_s
        self._served: dict[Request, RunningRequest] = {}
        self._kicked = False
        self._lost = False
        self._timer: asyncio.TimerHandle | None = None
        self._idle_check: asyncio.TimerHandle | None = None
        self.broken: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @property
    def n_requests(self) -> int:
        """Requests that have not ended."""
        return len(self._served)

    @property
    def n_waiting(self) -> int:
        """Requests that no step has begun."""
        return self.scheduler.n_waiting

    def submit(self, request: Request, served: RunningRequest | None, *, parked: bool = False) -> None:
        """Take a request on, to begin at once or after `unpark`; raises TooLongError.

        The outputs of a request that serves nobody are dropped.
        """
        self.scheduler.submit(request, parked=parked)
        if served is not None:
            self._served[request] = served
            served.buffer.live[served.request_id] = request
        self._kick()

    def unpark(self, requests: Iterable[Request]) -> None:
        """Begin with parked requests; those that have ended meanwhile are left alone."""
        for request in requests:
            self.scheduler.unpark(request)
        self._kick()

    def adopt(self, arrival: Arrival, n_blocks: int) -> None:
        """The ranks have written the next blocks of an arrival."""
        self.scheduler.adopt(arrival, n_blocks)
        self._kick()

    def settle(self, arrival: Arrival) -> None:
        """Nothing more arrives."""
        self.scheduler.transfers.settle(arrival)
        self._kick()

    def unpin(self, pin: Pin) -> None:
        """Another worker has read the blocks."""
        self.scheduler.transfers.unpin(pin)
        self._kick()  # a request may have waited for their room

    def cancel(self, request: Request) -> None:
        """Forget a request; its gateway hears nothing more of it."""
        if request in self._served:
            self._forget(request).close("cancelled")

    def release(self, *, waiting_only: bool = False) -> list[RunningRequest]:
        """Forget requests in order to hand them off; returns whose they were."""
        chosen = [request for request in self._served if not (waiting_only and request.slot >= 0)]
        return [self._forget(request) for request in chosen]

    def _forget(self, request: Request) -> RunningRequest:
        served = self._served.pop(request)
        served.buffer.live.pop(served.request_id, None)
        self.scheduler.cancel(request)
        self._kick()
        return served

    def lose(self) -> list[tuple[RunningRequest, bool]]:
        """The ranks are gone: every request is over here; whose they were, and whether the ranks had a plan with it."""
        self._lost = True
        self._disarm()
        lost = [(served, request.n_in_flight > 0) for request, served in self._served.items()]
        self.scheduler.abandon()
        self._meter.forget_in_flight()
        self._served.clear()
        return lost

    def on_result(self, result: StepResult) -> None:
        """The oldest plan in flight is done. The next one goes out before anybody is told."""
        now = time.monotonic()
        with self._guard():
            outputs = self.scheduler.apply(result)
            cost = self._meter.returned(now)
            self._adapt()
            self._advance()
            self._deliver(result.step, outputs, now)
            self._observer.step(result, cost)
        if self.scheduler.idle and self._idle_check is None:
            self._idle_check = asyncio.get_running_loop().call_later(IDLE_CHECK_S, self._check)
        self._changed()

    def _adapt(self) -> None:
        """Let the scheduler's trade-offs follow the speed of these ranks."""
        scheduler, config = self.scheduler, self.scheduler.config
        scheduler.share_min_tokens = self._meter.share_min_tokens(config.block_tokens)
        scheduler.pace = self._meter.pace(self._prefill_step_s, scheduler.n_running) or scheduler.pace

    def _kick(self) -> None:
        """Plan at the end of this turn of the loop, so that requests that arrive together start together."""
        if not self._kicked:
            self._kicked = True
            asyncio.get_running_loop().call_soon(self._pump)

    def _pump(self) -> None:
        self._kicked = False
        if self._timer is None:  # else the plan that is due soon picks up what is new
            with self._guard():
                self._advance()
        self._changed()

    def _advance(self) -> None:
        """Keep the ranks supplied, but plan no earlier than needed.

        While a long step executes, the plan after it waits until shortly before the expected end, so that requests
        which arrive meanwhile are in it. Too late costs a fraction of a millisecond, too early a whole step.
        """
        self._disarm()
        while not self._lost and self.scheduler.n_in_flight < self.scheduler.config.max_in_flight:
            if self.scheduler.n_in_flight and (spare := self._meter.spare_s(time.monotonic())) > 0:
                self._timer = asyncio.get_running_loop().call_later(spare, self._on_timer)
                return
            if not self._plan():
                return

    def _on_timer(self) -> None:
        self._timer = None
        with self._guard():
            self._plan()

    def _plan(self) -> bool:
        plan = None if self._lost else self.scheduler.plan()
        if plan is None:
            return False
        self._meter.planned(plan, time.monotonic())
        try:
            self._submit_plan(plan)
        except RanksFailedError:
            return False  # whoever watches the ranks is about to call `lose`
        if (suspect := self.scheduler.trial.begun()) is not None and suspect in self._served:
            served = self._served[suspect]
            served.buffer.announce_trial(served)
            served.buffer.flush(plan.step)
        return True

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check(self) -> None:
        """Nobody waits for us: see whether the scheduler's books still agree."""
        self._idle_check = None
        if self.scheduler.idle and not self._lost:
            with self._guard():
                self.scheduler.check()

    @contextmanager
    def _guard(self) -> Iterator[None]:
        """An error of ours in a callback must not end in a silent stand-still: this engine is given up instead."""
        try:
            yield
        except Exception as error:  # whatever it is, the books can no longer be trusted
            log.exception("the engine failed")
            self._lost = True
            if not self.broken.done():
                self.broken.set_result(f"internal error: {error!r}")

    def _deliver(self, step: int, outputs: list[Output], now: float) -> None:
        buffers: set[StreamBuffer] = set()
        for output in outputs:
            served = self._served.get(output.request)
            if served is None:
                continue
            if output.first:
                self._observer.first_output(output.request, now)
                served.span.add_event("first output", {"cached_tokens": output.request.cached_tokens})
            served.buffer.add(served, output)
            buffers.add(served.buffer)
            if output.finish is not None:
                del self._served[output.request]
        for buffer in buffers:
            buffer.flush(step)
