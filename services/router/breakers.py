"""The circuit breakers of a pool's members."""

from __future__ import annotations

from services.router.breaker import Breaker, BreakerLimits, BreakerState, ejected
from services.router.membership import Member


class Breakers:
    """One breaker per worker. Times are seconds of the pool's clock."""

    def __init__(self) -> None:
        self._breakers: dict[Member, Breaker] = {}
        self._tripped: dict[Member, Breaker] = {}

    def join(self, member: Member, limits: BreakerLimits) -> None:
        """A worker joins, with a closed breaker."""
        self._breakers[member] = Breaker(limits)

    def leave(self, member: Member) -> None:
        """A worker leaves."""
        del self._breakers[member]
        self._tripped.pop(member, None)

    def restarted(self, member: Member) -> None:
        """The worker has a new process, which starts with a closed breaker."""
        self.join(member, self._breakers[member].limits)
        self._tripped.pop(member, None)

    def called(self, member: Member, now: float) -> None:
        """A request was sent to the worker."""
        self._breakers[member].called(now)

    def fault(self, member: Member, now: float) -> None:
        """A request failed at the worker."""
        breaker = self._breakers[member]
        breaker.fault(now)
        if breaker.state(now) is not BreakerState.CLOSED:
            self._tripped[member] = breaker

    def success(self, member: Member, now: float) -> None:
        """A request succeeded at the worker."""
        breaker = self._breakers[member]
        breaker.success(now)
        if breaker.state(now) is BreakerState.CLOSED:
            self._tripped.pop(member, None)

    def no_verdict(self, member: Member, now: float) -> None:
        """A request ended for a reason outside the worker, or went to another worker."""
        self._breakers[member].no_verdict(now)

    def on_trial(self, member: Member) -> bool:
        """Whether a request to the worker shows whether it works again."""
        return member in self._tripped

    def state(self, member: Member, now: float) -> BreakerState:
        """The state of a worker's breaker."""
        return self._breakers[member].state(now)

    def tripped(self, now: float) -> list[tuple[str, BreakerState]]:
        """The breakers that are not closed, by worker id."""
        return [(member.worker_id, breaker.state(now)) for member, breaker in self._tripped.items()]

    def states(self, now: float) -> list[BreakerState]:
        """The states of all breakers."""
        return [breaker.state(now) for breaker in self._breakers.values()]

    def ejected(self, now: float) -> list[int]:
        """Indices of the workers that get no requests because of their breakers: at most half of the pool."""
        tripped = [(member.index, breaker) for member, breaker in self._tripped.items()]
        return ejected(tripped, len(self._breakers), now)
