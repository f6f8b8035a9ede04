"""Workers of one host start in turns, so that no more are awake than may be."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from services.common.processes.workers import start_in_turns


@pytest.mark.parametrize(
    ("max_awake", "priorities", "awake"),
    [
        (0, {}, "abcd"),
        (1, {}, "a"),
        (2, {}, "ab"),
        (2, {"d": math.inf}, "ad"),
        (3, {"c": math.inf, "d": math.inf}, "acd"),
        (4, {}, "abcd"),
        (9, {"a": math.inf}, "abcd"),
        (1, {"c": 1}, "c"),
        (2, {"a": -1, "d": 2}, "bd"),
        (2, {"b": math.inf, "d": 5}, "bd"),
    ],
)
async def test_first_named_workers_of_the_highest_priority_are_awake_at_the_end(
    max_awake: int, priorities: dict[str, float], awake: str
) -> None:
    now: set[str] = set()
    started: list[str] = []

    async def start(batch: Sequence[str]) -> None:
        now.update(batch)
        started.extend(batch)
        assert len(now) <= (max_awake or 4)

    async def sleep(worker: str) -> None:
        assert priorities.get(worker, 0) < math.inf
        now.remove(worker)

    await start_in_turns("abcd", max_awake, lambda worker: priorities.get(worker, 0), start, sleep)
    assert now == set(awake)
    assert sorted(started) == list("abcd")
