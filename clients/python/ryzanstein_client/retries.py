"""When a failed call is tried again: exponential back-off with jitter, within a budget and the call's own time.

Full jitter (a pause is drawn evenly between nothing and the back-off) keeps clients that failed together from coming
back together. The budget keeps retries a fraction of all calls: when a server is overloaded, clients that retry
everything would keep it so.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from ryzanstein_client.errors import ApiError, RyzansteinError, TimedOut


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often and how soon."""

    max_retries: int = 3  # limit of one call
    first_pause_s: float = 0.25  # doubled for each further retry
    longest_pause_s: float = 8.0
    longest_retry_after_s: float = 30.0  # a server that asks for more patience is not asked again
    saved_retries: int = 10  # retries that a client may spend at once; 0: never retry
    retries_per_call: float = 0.1  # retries that each call adds to the budget

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")


class RetryBudget:
    """Retries that a client may still spend; shared by its calls, in any thread."""

    def __init__(self, policy: RetryPolicy) -> None:
        self._most = float(policy.saved_retries)
        self._per_call = policy.retries_per_call
        self._saved = self._most
        self._lock = threading.Lock()

    def earn(self) -> None:
        """A call has begun."""
        with self._lock:
            self._saved = min(self._most, self._saved + self._per_call)

    def spend(self) -> bool:
        """Take a retry; False when there is none."""
        with self._lock:
            if self._saved < 1:
                return False
            self._saved -= 1
            return True


class Call:
    """The time and the retries of one call."""

    def __init__(
        self,
        policy: RetryPolicy,
        budget: RetryBudget,
        timeout_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._policy = policy
        self._budget = budget
        self._timeout_s = timeout_s
        self._clock = clock
        self._draw = draw  # evenly between 0 and 1
        self._deadline = clock() + timeout_s
        self._retries = 0
        budget.earn()

    def remaining(self) -> float:
        """Seconds left; raises :class:`TimedOut` when there are none."""
        if (left := self._left()) <= 0:
            raise self.timed_out()
        return left

    def timed_out(self) -> TimedOut:
        """The error of a call whose time is over."""
        return TimedOut(f"the call did not end within {self._timeout_s:g} s")

    def pause_after(self, error: RyzansteinError, *, resumes: bool = False) -> float:
        """Seconds to wait before the next try; raises the error itself when there must be none.

        With `resumes` the next try goes on where a stream was. That repeats no work, so it costs nothing of the budget.
        """
        if not error.retryable or self._retries >= self._policy.max_retries:
            raise error
        pause = self._pause(error)
        if pause >= self._left() or not (resumes or self._budget.spend()):
            raise error
        self._retries += 1
        return pause

    def progressed(self) -> None:
        """The last try brought something: the next failure is a first one again."""
        self._retries = 0

    def _left(self) -> float:
        return self._deadline - self._clock()

    def _pause(self, error: RyzansteinError) -> float:
        backoff = self._policy.first_pause_s * 2.0**self._retries
        wanted_s = error.retry_after if isinstance(error, ApiError) else None
        if wanted_s is None:
            return self._draw() * min(backoff, self._policy.longest_pause_s)
        if wanted_s > self._policy.longest_retry_after_s:
            raise error
        # Never earlier than asked; the jitter comes on top.
        return wanted_s + self._draw() * self._policy.first_pause_s


class Calls:
    """A client's calls: they share its budget."""

    def __init__(self, policy: RetryPolicy, timeout_s: float) -> None:
        """`timeout_s` is that of calls that name none."""
        self._policy = policy
        self._timeout_s = timeout_s
        self._budget = RetryBudget(policy)

    def begin(self, timeout_s: float | None) -> Call:
        """A call's time begins."""
        return Call(self._policy, self._budget, self._timeout_s if timeout_s is None else timeout_s)
