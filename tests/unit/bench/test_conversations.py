from __future__ import annotations

import pytest

from bench.conversations import Load, Turn, ideal_hit, imbalance, kept_share
from bench.sessions import readings

SYSTEM = list(range(20))


def turn(session: str, worker: str, *, prompt: int = 100, hit: int = 0, ideal: int = 0, output: int = 10) -> Turn:
    return Turn(session, worker, 0.0, 0.0, prompt, hit, ideal, output)


def test_the_ideal_hit_is_whole_blocks_of_the_longest_known_beginning() -> None:
    prompt = [*SYSTEM, *range(100, 130)]
    assert ideal_hit(prompt, [], block=8) == 0
    assert ideal_hit(prompt, [SYSTEM], block=8) == 16
    assert ideal_hit(prompt, [SYSTEM, [*prompt[:41], 7, 8]], block=8) == 40
    assert ideal_hit(prompt, [[1, *prompt]], block=8) == 0


def test_a_known_prompt_is_not_hit_in_its_last_token() -> None:
    prompt = list(range(32))
    assert ideal_hit(prompt, [prompt], block=16) == 16
    assert ideal_hit([*prompt, 5], [[*prompt, 5]], block=16) == 32


def test_imbalance_counts_those_without_work() -> None:
    assert imbalance([10, 10, 10]) == 0
    assert imbalance([12, 9, 9]) == pytest.approx(0.2)
    assert imbalance([30, 0, 0]) == pytest.approx(2)
    with pytest.raises(ValueError, match="no work"):
        imbalance([0, 0])


def test_turns_are_kept_where_the_turn_before_was() -> None:
    assert kept_share([turn("a", "0"), turn("b", "1"), turn("a", "0"), turn("b", "0"), turn("b", "0")]) == 2 / 3
    assert kept_share([turn("a", "0"), turn("b", "1")]) == 1


def test_a_worker_without_a_turn_shows_in_the_readings() -> None:
    turns = [turn("a", "worker-0", hit=48, ideal=64, output=10), turn("b", "worker-1", hit=0, ideal=32, output=10)]
    found = {reading.name.rpartition("/")[2]: reading.value for reading in readings(3, Load(2, 6, 0, 0, 0), turns, [])}
    assert found["prefix hits of the ideal"] == 50
    assert found["imbalance of requests"] == pytest.approx(50)
    assert found["imbalance of tokens computed"] == pytest.approx((110 / (172 / 3) - 1) * 100)
