"""The circuit breakers of a pool's members."""

from __future__ import annotations

from services.router.breaker import Breaker, BreakerLimits, BreakerState, ejected
from services.router.membership import Member


class Breakers:
    """One breaker a worker. Times come from the pool's clock, in seconds."""

    def __init__(self) -> None:
        self._breakers: dict[Member, Breaker] = {}
        self._tripped: dict[Member, Breaker] = {}

    def join(self, member: Member, limits: BreakerLimits) -> None:
        """A worker comes, trusted."""
        self._breakers[member] = Breaker(limits)

    def leave(self, member: Member) -> None:
        """A worker goes."""
        del self._breakers[member]
        self._tripped.pop(member, None)

    def restarted(self, member: Member) -> None:
        """A new process is forgiven what the last one did."""
        self.join(member, self._breakers[member].limits)
        self._tripped.pop(member, None)

    def called(self, member: Member, now: float) -> None:
        """A request is on its way there."""
        self._breakers[member].called(now)

    def fault(self, member: Member, now: float) -> None:
        """A request failed there."""
        breaker = self._breakers[member]
        breaker.fault(now)
        if breaker.state(now) is not BreakerState.CLOSED:
            self._tripped[member] = breaker

    def success(self, member: Member, now: float) -> None:
        """A request ended well there."""
        breaker = self._breakers[member]
        breaker.success(now)
        if breaker.state(now) is BreakerState.CLOSED:
            self._tripped.pop(member, None)

    def no_verdict(self, member: Member, now: float) -> None:
        """A request ended there for reasons that are not the worker's, or went elsewhere."""
        self._breakers[member].no_verdict(now)

    def state(self, member: Member, now: float) -> BreakerState:
        """The state of its breaker."""
        return self._breakers[member].state(now)

    def states(self, now: float) -> list[BreakerState]:
        """Of every worker."""
        return [breaker.state(now) for breaker in self._breakers.values()]

    def ejected(self, now: float) -> list[int]:
        """Who gets nothing now: never more than half of the pool."""
        tripped = [(member.index, breaker) for member, breaker in self._tripped.items()]
        return ejected(tripped, len(self._breakers), now)
