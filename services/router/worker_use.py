"""When a worker was last used, and whether it may sleep. Times are seconds of a monotonic clock."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from ryzanstein.v1 import worker_pb2

from services.router.membership import Member
from services.router.pool import Pool

# A worker that others wait for serves this long before it gets no more requests, or workers would only wake and sleep.
TURN_S = 2.0


@dataclass(slots=True)
class WorkerUse:
    """The use of one incarnation of a worker, as this router sees it."""

    pool: Pool
    member: Member
    incarnation: str
    last_used: float
    serving_since: float
    phase: worker_pb2.Phase = worker_pb2.PHASE_UNSPECIFIED
    computed: int = 0  # tokens since the process began
    busy: bool = False  # with requests that run, wait or are not acknowledged yet
    used: bool = False  # since the worker serves
    keep_alive_s: float | None = None  # the last one that a request named; negative: no sleep by idleness
    asked_again_at: float = 0.0  # a worker that has refused to sleep is asked again then

    def observe(self, now: float) -> None:
        """Read the worker's state."""
        state = self.member.state
        self.pool.load.expire(now)
        self.busy = bool(state.running or state.waiting or self.pool.load.unacknowledged(self.member))
        if state.phase == worker_pb2.PHASE_SERVING and self.phase != worker_pb2.PHASE_SERVING:
            self.last_used = self.serving_since = now
            self.used, self.computed = False, state.computed_tokens
        if state.phase == worker_pb2.PHASE_SLEEPING:
            self.keep_alive_s = None
        if self.busy or state.computed_tokens != self.computed:
            self.last_used, self.used = now, True
        self.phase, self.computed = state.phase, state.computed_tokens

    def placed(self, keep_alive_s: float | None, now: float) -> None:
        """A request was placed at the worker."""
        self.last_used, self.used = now, True
        if keep_alive_s is not None:
            self.keep_alive_s = keep_alive_s

    @property
    def awake(self) -> bool:
        """Whether the worker holds the memory of its model, as far as this router can see."""
        return self.member.connected and self.phase != worker_pb2.PHASE_SLEEPING

    @property
    def movable(self) -> bool:
        """Whether the worker could sleep once it is idle."""
        return self.awake and self.phase == worker_pb2.PHASE_SERVING and not self.member.state.pinned

    def is_overdue(self, now: float) -> bool:
        """Whether the worker has been idle for as long as it may be."""
        return self._may_sleep(now) and now - self.last_used >= self._longest_idle_s()

    def may_yield(self, now: float) -> bool:
        """Whether the worker may sleep for another one: it is idle, and was used since it woke or had its turn."""
        return self._may_sleep(now) and (self.used or self.had_turn(now))

    def had_turn(self, now: float) -> bool:
        """Whether the worker has served for a turn."""
        return now - self.serving_since >= TURN_S

    def _may_sleep(self, now: float) -> bool:
        return self.movable and not self.busy and now >= self.asked_again_at

    def _longest_idle_s(self) -> float:
        if self.keep_alive_s is not None:
            return self.keep_alive_s if self.keep_alive_s >= 0 else math.inf
        return self.member.state.idle_sleep_s or math.inf


def next_to_sleep(uses: Iterable[WorkerUse], now: float) -> WorkerUse | None:
    """Of the workers that may yield, the least recently used one of the lowest priority; None if all are in use."""
    able = (use for use in uses if use.may_yield(now))
    return min(able, key=lambda use: (use.member.state.priority, use.last_used), default=None)


def next_to_rest(uses: Iterable[WorkerUse], now: float) -> WorkerUse | None:
    """Of the busy workers that had their turn, the one of the lowest priority that has served longest, or None."""
    busy = (use for use in uses if use.movable and use.busy and use.had_turn(now))
    return min(busy, key=lambda use: (use.member.state.priority, use.serving_since), default=None)
