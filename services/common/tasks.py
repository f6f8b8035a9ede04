"""Runs and ends background tasks, and waits for events."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from typing import Any

from services.common.lifecycle import GaveUpError

_AGAIN_S = 0.5
RETRY_S = 5.0  # pause before a loop that has failed runs again

log = logging.getLogger(__name__)


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
async def running_loops(
    stop: asyncio.Event, *loops: Coroutine[Any, Any, None]
) -> AsyncIterator[Sequence[asyncio.Task[None]]]:
    """Run a service's loops while the block runs; a loop that ends by itself ends the service.

    Without the loop the service would look ready and go on with old knowledge. So its end is logged and sets `stop`:
    the service drains as if it were asked to end, and GaveUpError is raised after the block. A loop handles what is
    expected, such as a peer or Redis that is away. Once `stop` is set, loops may return.
    """
    failures: list[str] = []

    def note_end(task: asyncio.Task[None]) -> None:
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is None and stop.is_set():
            return
        failures.append(f"the loop {task.get_name()} has ended: {error!r}")
        log.error("%s; the service ends", failures[-1], exc_info=error)
        stop.set()

    tasks = [asyncio.create_task(loop, name=getattr(loop, "__qualname__", None)) for loop in loops]
    for task in tasks:
        task.add_done_callback(note_end)
    try:
        yield tasks
    finally:
        for task in tasks:
            task.remove_done_callback(note_end)
        await end_tasks(tasks)
    if failures:
        raise GaveUpError(failures[0])


async def retried(loop: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run an endless loop, and run it again when an error ends it, which is logged.

    It is for loops without which a service still serves: their errors must not end it, nor all its replicas.
    """
    while True:
        try:
            await loop()
        except Exception:  # a fault of ours
            log.exception("a loop has failed and runs again in %g s", RETRY_S)
        await asyncio.sleep(RETRY_S)


def log_failure(log: logging.Logger, task: asyncio.Task[Any]) -> None:
    """Log the error that has ended a task for which nothing waits."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("a background task has failed: %s", error, exc_info=error)


async def wait_for_event(event: asyncio.Event, timeout_s: float) -> None:
    """Wait until the event is set, at most `timeout_s`."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()
