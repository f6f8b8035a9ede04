"""Circuit breaker: stops calling what fails, and finds out with one probe when it works again.

A state machine over given times; it never looks at a clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum


class BreakerState(Enum):
    """Closed lets everything through, open nothing, half-open one probe at a time."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass(frozen=True, slots=True)
class BreakerLimits:
    """When to open, and for how long. Each opening without a success in between doubles the time."""

    faults: int = 3
    window_s: float = 10.0
    open_min_s: float = 5.0
    open_max_s: float = 60.0
    probe_timeout_s: float = 30.0  # a probe nobody reports on is given up
    # For what is called hundreds of times a second: the faults must have come without any success for this long, or a
    # pause of some milliseconds would pass for an outage. 0: successes do not count.
    lasting_s: float = 0.0


# For a dependency without which a decision is only less well informed: its failures cost a time-out each, so it is left
# alone quickly and looked at again soon.
DEPENDENCY = BreakerLimits(faults=3, window_s=10.0, open_min_s=0.5, open_max_s=5.0, probe_timeout_s=1.0, lasting_s=0.05)


class Breaker:
    """One breaker. Times may come from any clock that does not go backwards."""

    def __init__(self, limits: BreakerLimits) -> None:
        self.limits = limits
        self._faults: deque[float] = deque(maxlen=limits.faults)
        self._failing_since: float | None = None  # without a success
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
        """A call failed. While open that is old news."""
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
        """A call ended without telling anything about the other side; another probe may be made."""
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
    """Which of the workers with tripped breakers get nothing now: never more than half of the fleet.

    When the faults are everywhere they are hardly the workers'. Those that opened last stay out.
    """
    refused = [(breaker.opened_at, index) for index, breaker in tripped if not breaker.allows(now)]
    refused.sort(reverse=True)
    return [index for _, index in refused[: n_workers // 2]]
