"""Background tasks: no error of theirs is lost."""

from __future__ import annotations

import asyncio
import logging

import pytest

from services.common.tasks import running_loops


async def test_failed_loop_is_logged_and_the_remaining_loops_go_on(caplog: pytest.LogCaptureFixture) -> None:
    turned = asyncio.Event()

    async def failing() -> None:
        raise ValueError("a value that cannot be read")

    async def endless() -> None:
        while True:
            turned.set()
            await asyncio.sleep(0)

    async with asyncio.timeout(60), running_loops(logging.getLogger("services.tasks"), failing(), endless()):
        while not caplog.records:  # noqa: ASYNC110  # no event tells
            await asyncio.sleep(0)
        turned.clear()
        await turned.wait()
    (record,) = caplog.records
    assert "a value that cannot be read" in record.message
    assert record.exc_info
