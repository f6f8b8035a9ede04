from __future__ import annotations

from typing import ClassVar

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from services.router.breaker import DEPENDENCY, Breaker, BreakerLimits, BreakerState, ejected

LIMITS = BreakerLimits()


class BreakerMachine(RuleBasedStateMachine):
    """Against a model that keeps the whole history."""

    limits: ClassVar[BreakerLimits] = LIMITS

    def __init__(self) -> None:
        super().__init__()
        self.breaker = Breaker(self.limits)
        self.now = 0.0
        self.faults: list[float] = []
        self.first_failure: float | None = None  # after the last success
        self.open_until: float | None = None
        self.openings = 0
        self.probe: float | None = None

    def opens(self) -> None:
        self.open_until = self.now + min(self.limits.open_max_s, self.limits.open_min_s * 2**self.openings)
        self.openings += 1
        self.faults = []
        self.probe = None

    def half_open(self) -> bool:
        return self.open_until is not None and self.now >= self.open_until

    @rule(seconds=st.floats(0.01, 0.1) | st.floats(0.01, 70))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def fault(self) -> None:
        self.breaker.fault(self.now)
        if self.open_until is None:
            self.faults.append(self.now)
            self.first_failure = self.now if self.first_failure is None else self.first_failure
            often = len([t for t in self.faults if self.now - t <= self.limits.window_s]) >= self.limits.faults
            if often and self.now - self.first_failure >= self.limits.lasting_s:
                self.opens()
        elif self.half_open():
            self.opens()

    @rule()
    def success(self) -> None:
        self.breaker.success(self.now)
        self.first_failure = None
        if self.limits.lasting_s:
            self.faults = []
        if self.half_open():
            self.open_until, self.probe, self.openings = None, None, 0

    @rule()
    def call(self) -> None:
        if self.breaker.allows(self.now):
            self.breaker.called(self.now)
            if self.half_open():
                self.probe = self.now

    @rule()
    def no_verdict(self) -> None:
        self.breaker.no_verdict(self.now)
        if self.half_open():
            self.probe = None

    @invariant()
    def agrees(self) -> None:
        if self.open_until is None:
            expected = BreakerState.CLOSED
        else:
            expected = BreakerState.HALF_OPEN if self.half_open() else BreakerState.OPEN
        assert self.breaker.state(self.now) is expected
        probing = self.probe is not None and self.now - self.probe < self.limits.probe_timeout_s
        allowed = expected is BreakerState.CLOSED or (expected is BreakerState.HALF_OPEN and not probing)
        assert self.breaker.allows(self.now) == allowed


class DependencyMachine(BreakerMachine):
    limits = DEPENDENCY


TestBreaker = BreakerMachine.TestCase
TestDependency = DependencyMachine.TestCase


def test_a_pause_is_no_outage() -> None:
    breaker, now = Breaker(DEPENDENCY), 0.0
    for _ in range(100):  # a pause in which twenty calls time out, now and then
        for _ in range(20):
            breaker.fault(now)
        breaker.success(now + 0.01)
        now += 0.1
    assert breaker.state(now) is BreakerState.CLOSED
    for i in range(7):
        breaker.fault(now + 0.01 * i)
    assert breaker.state(now + 0.06) is BreakerState.OPEN


def opened(at: float) -> Breaker:
    breaker = Breaker(LIMITS)
    for _ in range(3):
        breaker.fault(at)
    return breaker


@given(st.integers(1, 20), st.data())
def test_at_most_half_of_the_fleet_is_ejected(n_workers: int, data: st.DataObject) -> None:
    broken = data.draw(st.sets(st.integers(0, n_workers - 1)))
    tripped = [(i, opened(float(i))) for i in sorted(broken)]
    out = ejected(tripped, n_workers, now=n_workers + 0.0 if n_workers < 5 else 4.0)
    assert len(out) <= n_workers // 2
    assert set(out) <= broken


def test_the_latest_failed_workers_stay_ejected() -> None:
    tripped = [(i, opened(float(i))) for i in range(4)]
    assert sorted(ejected(tripped, 4, now=4.0)) == [2, 3]
