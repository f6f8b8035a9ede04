"""Runs and ends background tasks, and waits for events."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Coroutine, Iterable
from functools import partial
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


@contextlib.asynccontextmanager
async def running_loops(log: logging.Logger, *loops: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run endless loops while the block runs. The error of one is logged when it ends the loop; the others go on."""
    tasks = [asyncio.create_task(loop) for loop in loops]
    for task in tasks:
        task.add_done_callback(partial(log_failure, log))
    try:
        yield
    finally:
        await end_tasks(tasks)


def log_failure(log: logging.Logger, task: asyncio.Task[Any]) -> None:
    """Log the error that has ended a task for which nothing waits."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("a background task has failed: %s", error, exc_info=error)


async def wait_for_event(event: asyncio.Event, timeout_s: float) -> None:
    """Wait until the event is set, at most `timeout_s`."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()
