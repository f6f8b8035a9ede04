"""How every service process starts and ends."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import Callable, Coroutine

import uvloop

log = logging.getLogger(__name__)


class StartupError(Exception):
    """The service cannot start; the message is one line for the operator."""


def run_service(main: Callable[[asyncio.Event], Coroutine[None, None, None]]) -> None:
    """Run `main(stop)` on uvloop until it returns; SIGTERM and SIGINT set `stop`.

    Exits with status 1 and one log line when `main` raises :class:`StartupError` or OSError.
    """

    async def supervise() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, stop.set)
        await main(stop)

    try:
        uvloop.run(supervise())
    except (StartupError, OSError) as error:
        log.error("cannot start: %s", error)
        sys.exit(1)
