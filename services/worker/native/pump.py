"""Keeps the ranks busy: plans go out as soon as there is room, results become outputs of requests."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from services.worker.engine.output import Output
from services.worker.native.step_cost import StepCost, StepTimer
from services.worker.process.failure import RanksFailedError
from services.worker.protocol.plan import StepPlan, StepResult
from services.worker.scheduling.request import Request
from services.worker.scheduling.scheduler import Scheduler
from services.worker.scheduling.transfers import Arrival, Pin

IDLE_CHECK_S = 1.0  # after the last step; once for every time the engine falls idle

log = logging.getLogger(__name__)


class StepPump:
    """The steps of ranks that serve, until these are lost. Everything happens in callbacks; nothing polls."""

    def __init__(
        self,
        scheduler: Scheduler,
        step_timer: StepTimer,
        prefill_step_s: float,
        send: Callable[[StepPlan], None],
        planned: Callable[[StepPlan], None],
        computed: Callable[[StepResult, list[tuple[Request, Output]], StepCost, float], None],
        changed: Callable[[], None],
    ) -> None:
        """`planned` hears of every plan that went out, `computed` of every result once the next plan did."""
        self.scheduler = scheduler
        self._step_timer, self._prefill_step_s = step_timer, prefill_step_s
        self._send, self._planned, self._computed, self._changed = send, planned, computed, changed
        self._last_result = 0.0
        self._kicked = False
        self._timer: asyncio.TimerHandle | None = None
        self._idle_check: asyncio.TimerHandle | None = None
        self.broken: asyncio.Future[str] = asyncio.get_running_loop().create_future()  # why nothing more is planned

    def requeue(self, requests: Iterable[Request]) -> None:
        """Begin with deferred requests; those that have ended meanwhile are left alone."""
        for request in requests:
            self.scheduler.requeue(request)
        self.kick()

    def adopt(self, arrival: Arrival, n_blocks: int) -> None:
        """The ranks have written the next blocks of an arrival."""
        self.scheduler.adopt(arrival, n_blocks)
        self.kick()

    def finish(self, arrival: Arrival) -> None:
        """Nothing more arrives."""
        self.scheduler.transfers.finish(arrival)
        self.kick()

    def unpin(self, pin: Pin) -> None:
        """Another worker has read the blocks."""
        self.scheduler.transfers.unpin(pin)
        self.kick()  # a request may have waited for their room

    def kick(self) -> None:
        """Plan at the end of this turn of the loop, so that requests that arrive together start together."""
        if not self._kicked:
            self._kicked = True
            asyncio.get_running_loop().call_soon(self._on_kick)

    def stop(self, reason: str) -> None:
        """Nothing more goes to the ranks."""
        self._disarm()
        if not self.broken.done():
            self.broken.set_result(reason)

    def on_result(self, result: StepResult) -> None:
        """The oldest plan in flight is done. The next one goes out before anybody is told."""
        now = time.monotonic()
        with self._guard():
            step = self.scheduler.in_flight[0]
            cost = self._step_timer.returned(step.load, now - max(step.planned_at, self._last_result))
            self._last_result = now
            outputs = self.scheduler.apply(result)
            self._adapt()
            self._advance()
            self._computed(result, outputs, cost, now)
        if self.scheduler.idle and self._idle_check is None:
            self._idle_check = asyncio.get_running_loop().call_later(IDLE_CHECK_S, self._check)
        self._changed()

    def _adapt(self) -> None:
        """Let the scheduler's trade-offs follow the speed of these ranks."""
        scheduler = self.scheduler
        scheduler.share_min_tokens = self._step_timer.share_min_tokens(scheduler.config.block_tokens)
        measured = self._step_timer.prefill_budget(self._prefill_step_s, scheduler.n_running)
        scheduler.prefill_budget = measured or scheduler.prefill_budget

    def _on_kick(self) -> None:
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
        in_flight, most = self.scheduler.in_flight, self.scheduler.config.max_in_flight
        while not self.broken.done() and len(in_flight) < most:
            if in_flight and (spare := self._spare_s()) > 0:
                self._timer = asyncio.get_running_loop().call_later(spare, self._on_timer)
                return
            if not self._plan():
                return

    def _spare_s(self) -> float:
        """How long the plan after the executing step can wait so that it arrives in time; 0 or less: not at all."""
        step = self.scheduler.in_flight[0]
        spare = self._step_timer.spare_s(step.load)
        return spare and max(step.planned_at, self._last_result) + spare - time.monotonic()

    def _on_timer(self) -> None:
        self._timer = None
        with self._guard():
            self._plan()

    def _plan(self) -> bool:
        plan = None if self.broken.done() else self.scheduler.plan()
        if plan is None:
            return False
        try:
            self._send(plan)
        except RanksFailedError:
            return False  # whoever watches the ranks is about to stop us
        self._planned(plan)
        return True

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check(self) -> None:
        """Nobody waits for us: see whether the scheduler's books still agree."""
        self._idle_check = None
        if self.scheduler.idle and not self.broken.done():
            with self._guard():
                self.scheduler.check()

    @contextmanager
    def _guard(self) -> Iterator[None]:
        """An error of ours in a callback must not end in a silent stand-still: these ranks are given up instead."""
        try:
            yield
        except Exception as error:  # whatever it is, the books can no longer be trusted
            log.exception("the engine failed")
            self.stop(f"internal error: {error!r}")
