"""Ending background tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

_AGAIN_S = 0.5


async def end_tasks(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks until they have ended.

    Once is not enough: `asyncio.wait_for` before Python 3.12, which redis-py uses, swallows a cancellation that
    arrives together with its result. An `asyncio.TaskGroup` cancels its tasks once, whatever comes after that: around
    endless ones that use such libraries it may never end.
    """
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=_AGAIN_S)
