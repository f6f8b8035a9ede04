"""Ends background tasks, and waits for events."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable
from typing import Any

_AGAIN_S = 0.5


async def end_tasks(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks until they have ended.

    One cancellation is not enough: redis-py uses `asyncio.wait_for`, which before Python 3.12 swallows a cancellation
    that arrives together with its result. An `asyncio.TaskGroup` cancels its tasks only once, and so might never end
    around endless tasks that use such libraries.
    """
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=_AGAIN_S)


async def wait_for_event(event: asyncio.Event, timeout_s: float) -> None:
    """Wait until the event is set, at most `timeout_s`."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()
