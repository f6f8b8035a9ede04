"""A process that does not answer is detected, whether it has ever answered or not."""

from __future__ import annotations

import asyncio

from services.common.processes import liveness


async def test_a_process_that_stopped_answering_is_given_up_after_a_few_failures() -> None:
    answers = iter([False, True, False, False, True])
    calls: list[bool] = []

    async def alive() -> bool:
        calls.append(next(answers, False))
        return calls[-1]

    async with asyncio.timeout(120):
        await liveness.wait_silent(alive, 20.0)
    assert calls == [False, True, False, False, True, *[False] * liveness.FAILURES]


async def test_a_process_that_never_answered_is_given_up_after_the_start_timeout() -> None:
    """As one that was stopped before it was asked for the first time."""

    async def alive() -> bool:
        return False

    async with asyncio.timeout(120):
        await liveness.wait_silent(alive, 0.2)
