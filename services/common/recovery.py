"""Starts what an engine has lost again, with growing delays and within a limit."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from services.common.lifecycle import GaveUpError

FIRST_BACKOFF_S = 0.25
MAX_BACKOFF_S = 30.0
STABLE_S = 60.0  # a loss of what lived this long resets the back-off

log = logging.getLogger(__name__)

Started = TypeVar("Started")


class Recovery:
    """Remembers the delay from one loss to the next."""

    def __init__(self, limit_s: float, reason: Callable[[], str]) -> None:
        """`limit_s`: longest time of repeated attempts; 0: no limit. `reason` says why the engine does not serve."""
        self._limit_s, self._reason = limit_s, reason
        self._backoff = FIRST_BACKOFF_S

    async def restart(
        self,
        start: Callable[[], Awaitable[Started]],
        failure: type[Exception],
        failed: Callable[[Exception], None],
        lived_s: float,
    ) -> Started:
        """Call `start` until it does not raise a `failure`, which `failed` gets; returns its result.

        `lived_s`: how long the lost processes had served. Raises GaveUpError at the limit.
        """
        if lived_s > STABLE_S:
            self._backoff = FIRST_BACKOFF_S
        limit = asyncio.timeout(self._limit_s or None)
        try:
            async with limit:
                while True:
                    await asyncio.sleep(self._backoff)
                    self._backoff = min(self._backoff * 2, MAX_BACKOFF_S)
                    try:
                        return await start()
                    except failure as error:
                        log.error("restart failed, next try in %.1f s: %s", self._backoff, error)
                        failed(error)
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise GaveUpError(
                f"not serving for {self._limit_s:g} s (RYZANSTEIN_RECOVERY_LIMIT_S): {self._reason()}"
            ) from error
