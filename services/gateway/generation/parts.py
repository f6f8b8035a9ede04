"""The sequences of one request: those that no worker has taken yet wait for those that run."""

from __future__ import annotations

import asyncio
import math

_LOOKING = 8  # more would only fill the routers' queue, where others wait, too


class Parts:
    """What the parts of a request know of each other."""

    def __init__(self) -> None:
        self.looking = asyncio.Semaphore(_LOOKING)  # held by a part while routers look for its first worker
        self._running = 0
        self._left_at = -math.inf  # event-loop time

    def placed(self) -> None:
        """A part has a worker."""
        self._running += 1

    def left(self, now: float) -> None:
        """A part has none any more: it has ended, or goes on elsewhere."""
        self._running -= 1
        self._left_at = now

    def going_on(self, now: float, patience_s: float) -> bool:
        """Whether the request is being worked on, or was less than `patience_s` ago."""
        return self._running > 0 or now - self._left_at < patience_s
