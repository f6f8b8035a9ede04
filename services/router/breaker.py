"""A circuit breaker: it stops calls to a target that fails, and probes with one call whether the target works again.

A state machine: callers pass the time in, it never reads a clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum


class BreakerState(Enum):
    """Closed allows every call, open allows none, half-open allows one probe at a time."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass(frozen=True, slots=True)
class BreakerLimits:
    """When a breaker opens, and for how long. The time doubles with each opening that follows no success."""

    faults: int = 3
    window_s: float = 10.0
    open_min_s: float = 5.0
    open_max_s: float = 60.0
    probe_timeout_s: float = 30.0  # a probe without a report expires after this time
    # The breaker opens only if no call has succeeded for this long. For a target that gets hundreds of calls a second:
    # without it, a pause of a few milliseconds would look like an outage. 0: successes between faults do not count.
    lasting_s: float = 0.0


# For the coordinator and Redis: a decision is possible without them, but each failed call costs a time-out. So the
# breaker opens quickly and probes again soon.
DEPENDENCY = BreakerLimits(faults=3, window_s=10.0, open_min_s=0.5, open_max_s=5.0, probe_timeout_s=1.0, lasting_s=0.05)


class Breaker:
    """One breaker. Times may come from any clock that does not go backwards."""

    def __init__(self, limits: BreakerLimits) -> None:
        self.limits = limits
        self._faults: deque[float] = deque(maxlen=limits.faults)
        self._failing_since: float | None = None  # the first fault since the last success
        self._openings = 0
        self._open_until: float | None = None
        self._probe_since: float | None = None
        self.opened_at = 0.0

    def state(self, now: float) -> BreakerState:
        """The state at `now`."""
        if self._open_until is None:
            return BreakerState.CLOSED
        return BreakerState.OPEN if now < self._open_until else BreakerState.HALF_OPEN

    def allows(self, now: float) -> bool:
        """Whether one more call may be made."""
        match self.state(now):
            case BreakerState.CLOSED:
                return True
            case BreakerState.OPEN:
                return False
        return self._probe_since is None or now - self._probe_since >= self.limits.probe_timeout_s

    def called(self, now: float) -> None:
        """A call is made; in half-open state it is the probe."""
        if self.state(now) is BreakerState.HALF_OPEN:
            self._probe_since = now

    def fault(self, now: float) -> None:
        """A call failed. An open breaker ignores it."""
        match self.state(now):
            case BreakerState.CLOSED:
                self._faults.append(now)
                if self._failing_since is None:
                    self._failing_since = now
                often = len(self._faults) == self.limits.faults and now - self._faults[0] <= self.limits.window_s
                if often and now - self._failing_since >= self.limits.lasting_s:
                    self._open(now)
            case BreakerState.HALF_OPEN:
                self._open(now)

    def success(self, now: float) -> None:
        """A call succeeded; in half-open state that closes the breaker."""
        self._failing_since = None
        if self.limits.lasting_s:
            self._faults.clear()
        if self.state(now) is BreakerState.HALF_OPEN:
            self._open_until = self._probe_since = None
            self._openings = 0

    def no_verdict(self, now: float) -> None:
        """A call ended without evidence about the target; another probe may be made."""
        if self.state(now) is BreakerState.HALF_OPEN:
            self._probe_since = None

    def _open(self, now: float) -> None:
        limits = self.limits
        self._open_until = now + min(limits.open_min_s * 2.0 ** min(self._openings, 32), limits.open_max_s)
        self._openings += 1
        self._probe_since = None
        self._faults.clear()
        self.opened_at = now


def ejected(tripped: Iterable[tuple[int, Breaker]], n_workers: int, now: float) -> list[int]:
    """The workers that get no requests because of their breakers: at most half of the fleet.

    If more than half have faults, the cause is probably not the workers. The breakers that opened last then count.
    """
    refused = [(breaker.opened_at, index) for index, breaker in tripped if not breaker.allows(now)]
    refused.sort(reverse=True)
    return [index for _, index in refused[: n_workers // 2]]
