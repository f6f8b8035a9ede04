"""The sequences of one request share a place in the routers' queue and the patience for a worker."""

from __future__ import annotations

import asyncio
import math

_LOOKING = 8  # more would only fill the routers' queue, which all requests share


class SequenceGroup:
    """Counts the sequences of a request that run: while any does, the others may wait for a worker."""

    def __init__(self) -> None:
        self.looking = asyncio.Semaphore(_LOOKING)  # held by a sequence while routers look for its first worker
        self._running = 0
        self._left_at = -math.inf  # event-loop time

    def placed(self) -> None:
        """A sequence has a worker."""
        self._running += 1

    def left(self, now: float) -> None:
        """A sequence has left its worker: it has ended, or continues on another worker."""
        self._running -= 1
        self._left_at = now

    def going_on(self, now: float, patience_s: float) -> bool:
        """Whether the request is being worked on, or was less than `patience_s` ago."""
        return self._running > 0 or now - self._left_at < patience_s
