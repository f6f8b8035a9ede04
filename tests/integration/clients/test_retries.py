"""Retries: how soon, how often, and when never."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from ryzanstein_client import (
    ApiError,
    BadRequest,
    ChatOptions,
    RateLimited,
    RetryPolicy,
    RyzansteinError,
    Settings,
    TimedOut,
)
from ryzanstein_client.errors import ErrorFields, unreachable
from ryzanstein_client.rest.answers import error_of_answer
from ryzanstein_client.retries import Call, RetryBudget

POLICY = RetryPolicy(max_retries=5, first_pause_s=1.0, longest_pause_s=4.0)
LOST = unreachable("gone")


@dataclass
class RetryClock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def new_call(policy: RetryPolicy = POLICY, timeout_s: float = 100, draw: float = 1.0, **parts: object) -> Call:
    budget = RetryBudget(policy)
    return Call(policy, budget, timeout_s, **({"clock": RetryClock(), "draw": lambda: draw} | parts))


def limited(retry_after: float | None, code: str = "overloaded") -> RateLimited:
    return RateLimited(ErrorFields("busy", code=code), retry_after)


def test_pauses_double_up_to_the_longest_and_then_end() -> None:
    call = new_call()
    assert [call.pause_after(LOST) for _ in range(5)] == [1, 2, 4, 4, 4]
    with pytest.raises(ApiError, match="gone"):
        call.pause_after(LOST)


def test_jitter_spreads_over_the_whole_pause() -> None:
    assert [new_call(draw=draw).pause_after(LOST) for draw in (0.0, 0.5, 1.0)] == [0, 0.5, 1]


def test_the_server_says_how_long_and_is_never_asked_earlier() -> None:
    assert [new_call(draw=draw).pause_after(limited(7)) for draw in (0.0, 1.0)] == [7, 8]
    with pytest.raises(RateLimited):
        new_call().pause_after(limited(31))


@pytest.mark.parametrize(
    "error", [BadRequest(ErrorFields("no")), TimedOut("late"), limited(1, "insufficient_quota"), RyzansteinError("?")]
)
def test_permanent_error_is_not_retried(error: RyzansteinError) -> None:
    with pytest.raises(type(error)):
        new_call().pause_after(error)


def test_no_retry_that_would_come_after_the_calls_time() -> None:
    clock = RetryClock()
    call = new_call(timeout_s=3, clock=clock)
    assert call.pause_after(LOST) == 1
    clock.now = 1.5
    with pytest.raises(ApiError, match="gone"):
        call.pause_after(LOST)
    clock.now = 3
    with pytest.raises(TimedOut, match="3 s"):
        call.remaining()


def test_the_budget_keeps_retries_a_fraction_of_all_calls() -> None:
    policy = RetryPolicy(max_retries=1, saved_retries=5, retries_per_call=0.1)
    budget = RetryBudget(policy)
    retried = 0
    for _ in range(1000):
        try:
            Call(policy, budget, 100).pause_after(LOST)
            retried += 1
        except ApiError:
            pass
    assert 100 <= retried <= 105


def test_resuming_costs_no_budget_and_progress_forgives() -> None:
    policy = RetryPolicy(max_retries=2, saved_retries=0, first_pause_s=1)
    call = new_call(policy)
    with pytest.raises(ApiError):
        call.pause_after(LOST)
    for _ in range(3):
        assert [call.pause_after(LOST, resumes=True) for _ in range(2)] == [1, 2]
        with pytest.raises(ApiError):
            call.pause_after(LOST, resumes=True)
        call.progressed()


@pytest.mark.parametrize(
    ("value", "low", "high"),
    [("7", 7, 7), ("Mon, 01 Jan 2001 00:00:00 GMT", 0, 0), ("Fri, 31 Dec 9999 23:59:59 GMT", 1e9, 1e12)],
)
def test_retry_after_as_seconds_or_date(value: str, low: float, high: float) -> None:
    error = error_of_answer(503, {"retry-after": value}, b"<html>bad gateway</html>")
    assert error.retry_after is not None
    assert low <= error.retry_after <= high
    assert "bad gateway" in error.message


@pytest.mark.parametrize("value", ["", "soon", "-1", "²"])
def test_unreadable_retry_after_is_ignored(value: str) -> None:
    assert error_of_answer(429, {"retry-after": value}, b"{}").retry_after is None


def test_bad_settings_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="timeout_s"):
        Settings(timeout_s=0)
    with pytest.raises(ValueError, match="first_pause_s"):
        RetryPolicy(first_pause_s=-1)
    with pytest.raises(TypeError, match=r"temprature.*known options.*temperature"):
        Settings().generation_fields({"temprature": 1}, ChatOptions)
