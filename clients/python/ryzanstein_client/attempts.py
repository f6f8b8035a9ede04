"""Calls with one answer: tried until they succeed, must not be tried again, or their time is over."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from ryzanstein_client.errors import CONNECTION_LOST, RyzansteinError, Unavailable
from ryzanstein_client.retries import Call

Answer = TypeVar("Answer")


def persist(attempt: Callable[[float], Answer], call: Call, *, repeatable: bool = True) -> Answer:
    """The answer of the first attempt that succeeds; an attempt is given the seconds that it may take.

    Calls that are not `repeatable` are tried again only after a refusal by the server.
    """
    while True:
        try:
            return attempt(call.remaining())
        except RyzansteinError as error:
            if not repeatable and isinstance(error, Unavailable) and error.code == CONNECTION_LOST:
                raise
            time.sleep(call.pause_after(error))


async def persist_async(
    attempt: Callable[[float], Awaitable[Answer]], call: Call, *, repeatable: bool = True
) -> Answer:
    """:func:`persist` for asyncio."""
    while True:
        left = call.remaining()
        try:
            async with asyncio.timeout(left):
                return await attempt(left)
        except TimeoutError as error:
            raise call.timed_out() from error
        except RyzansteinError as error:
            if not repeatable and isinstance(error, Unavailable) and error.code == CONNECTION_LOST:
                raise
            await asyncio.sleep(call.pause_after(error))
