"""Keeps the ranks busy: sends plans as soon as there is room, and turns results into outputs of requests."""

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

IDLE_CHECK_S = 1.0  # delay of the check after the last step; one check each time the engine becomes idle

log = logging.getLogger(__name__)


class StepPump:
    """Runs the steps of the serving ranks until they are lost. It works in callbacks and does not poll."""

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
        """Calls `planned` for every plan sent, and `computed` for every result after the next plan is sent."""
        self.scheduler = scheduler
        self._step_timer, self._prefill_step_s = step_timer, prefill_step_s
        self._send, self._planned, self._computed, self._changed = send, planned, computed, changed
        self._last_result = 0.0
        self._kicked = False
        self._timer: asyncio.TimerHandle | None = None
        self._idle_check: asyncio.TimerHandle | None = None
        self.broken: asyncio.Future[str] = asyncio.get_running_loop().create_future()  # the reason why planning ended

    def requeue(self, requests: Iterable[Request]) -> None:
        """Queue deferred requests; skips those that have ended meanwhile."""
        for request in requests:
            self.scheduler.requeue(request)
        self.kick()

    def adopt(self, arrival: Arrival, n_blocks: int) -> None:
        """Publish the next blocks of an arrival, which the ranks have written."""
        self.scheduler.adopt(arrival, n_blocks)
        self.kick()

    def finish(self, arrival: Arrival) -> None:
        """End a transfer from another worker."""
        self.scheduler.transfers.finish(arrival)
        self.kick()

    def unpin(self, pin: Pin) -> None:
        """Release blocks that another worker has read."""
        self.scheduler.transfers.unpin(pin)
        self.kick()  # a request may wait for these blocks

    def kick(self) -> None:
        """Plan at the end of this iteration of the event loop, so that requests that arrive together start together."""
        if not self._kicked:
            self._kicked = True
            asyncio.get_running_loop().call_soon(self._on_kick)

    def stop(self, reason: str) -> None:
        """Send no more plans."""
        self._disarm()
        if not self.broken.done():
            self.broken.set_result(reason)

    def on_result(self, result: StepResult) -> None:
        """Apply the result of the oldest plan in flight; send the next plan before delivering the outputs."""
        now = time.monotonic()
        with self._guard():
            step = self.scheduler.in_flight[0]
            accepted = self.scheduler.counters.accepted_tokens.total()
            outputs = self.scheduler.apply(result)
            accepted = self.scheduler.counters.accepted_tokens.total() - accepted
            wait_s = result.times.wait / 1e6 if step.waited else 0.0
            began = self._last_result if step.waited else max(step.planned_at, self._last_result)
            seconds = max(0.0, now - began - wait_s)
            cost = self._step_timer.returned(step.load, seconds, accepted, wait_s)
            self._last_result = now
            self._adapt()
            self._advance()
            self._computed(result, outputs, cost, now)
        if self.scheduler.idle and self._idle_check is None:
            self._idle_check = asyncio.get_running_loop().call_later(IDLE_CHECK_S, self._check)
        self._changed()

    def _adapt(self) -> None:
        """Set the scheduler's trade-offs from the measured speed of the ranks."""
        scheduler = self.scheduler
        scheduler.share_min_tokens = self._step_timer.share_min_tokens(scheduler.config.block_tokens)
        measured = self._step_timer.prefill_budget(self._prefill_step_s, scheduler.n_running)
        scheduler.prefill_budget = measured or scheduler.prefill_budget
        scheduler.speculator.cost = self._step_timer.draft_cost(scheduler.n_running)
        if (snapshots := scheduler.transfers.snapshots) is not None:
            snapshots.adapt(self._step_timer.prefill_tokens_per_s)

    def _on_kick(self) -> None:
        self._kicked = False
        if self._timer is None:  # otherwise the plan that is due soon includes new requests
            with self._guard():
                self._advance()
        self._changed()

    def _advance(self) -> None:
        """Keep the ranks supplied, but plan as late as possible.

        While a long step executes, the next plan waits until shortly before the expected end, so that it includes
        requests that arrive meanwhile. A late plan costs a fraction of a millisecond; a request that misses its plan
        waits a whole step.
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
        """Seconds that the plan after the executing step can wait and still be in time; at most 0: plan now."""
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
            return False  # the engine watches the ranks and will stop this pump
        self._planned(plan)
        return True

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check(self) -> None:
        """While idle, check that the scheduler's state is consistent."""
        self._idle_check = None
        if self.scheduler.idle and not self.broken.done():
            with self._guard():
                self.scheduler.check()

    @contextmanager
    def _guard(self) -> Iterator[None]:
        """End planning after an unexpected error in a callback, so that the engine restarts the ranks."""
        try:
            yield
        except Exception as error:  # after any error the scheduler's state may be inconsistent
            log.exception("the engine failed")
            self.stop(f"internal error: {error!r}")
