"""Workers of one host start in turns, so that no more are awake than may be."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from services.common.processes.workers import start_in_turns


@pytest.mark.parametrize(
    ("max_awake", "pinned", "awake"),
    [(0, "", "abcd"), (1, "", "a"), (2, "", "ab"), (2, "d", "ad"), (3, "cd", "acd"), (4, "", "abcd"), (9, "a", "abcd")],
)
async def test_named_first_and_pinned_workers_are_awake_at_the_end(max_awake: int, pinned: str, awake: str) -> None:
    now: set[str] = set()
    started: list[str] = []

    async def start(batch: Sequence[str]) -> None:
        now.update(batch)
        started.extend(batch)
        assert len(now) <= (max_awake or 4)

    async def sleep(worker: str) -> None:
        assert worker not in pinned
        now.remove(worker)

    await start_in_turns("abcd", max_awake, pinned.__contains__, start, sleep)
    assert now == set(awake)
    assert sorted(started) == list("abcd")
