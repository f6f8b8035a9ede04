from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from loadtest.timing import AnswerClock
from loadtest.traffic import QUESTIONS, choose_system_prompt, code_prompt, conversation


def clock_of(*seconds: float) -> Callable[[], float]:
    readings = iter(seconds)
    return lambda: next(readings)


def test_times_of_an_answer() -> None:
    clock = AnswerClock(clock_of(10.0, 10.2, 10.3, 10.8, 11.0))
    for _ in range(3):
        clock.arrived()
    times = clock.times(tokens=4)
    assert (times.total, times.first, times.per_token) == pytest.approx((1_000, 200, 200))
    assert times.longest_pause == pytest.approx(500)


def test_an_answer_that_never_came_waits_until_its_end() -> None:
    times = AnswerClock(clock_of(0.0, 3.0)).times(tokens=0)
    assert (times.first, times.per_token, times.longest_pause) == (3_000, 0, 0)


def test_conversations_are_fixed_by_their_generator() -> None:
    def draw(seed: int) -> list[object]:
        rng = random.Random(seed)
        return [choose_system_prompt(rng), *conversation(rng, 3.0), code_prompt(rng)]

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)


def test_a_conversation_begins_at_once_and_then_thinks() -> None:
    for seed in range(50):
        first, *later = conversation(random.Random(seed), 3.0)
        assert first.think_s == 0
        assert first.text in QUESTIONS
        assert 1 <= len(later) <= 4
        assert all(turn.think_s > 0 for turn in later)
