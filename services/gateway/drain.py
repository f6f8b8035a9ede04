"""Ends a gateway without failing a request.

    serving -> draining (not ready, but serving: for the delay, and until no new request has come for a while)
            -> closing  (refuses new requests; open ones may run until the deadline)
            -> over     (open requests end with an error)

A load balancer needs the first step: it sends requests until it notices that this gateway is not ready. On a busy
machine it notices late, so new requests prolong the step.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from enum import IntEnum
from typing import Any

from services.gateway.errors import shutting_down

log = logging.getLogger(__name__)

# Time after the deadline to send each open request its error, and to exchange the last frames.
LAST_WORDS_S = 2.0
# Wait this long for a request that was in flight when the last one ended.
_QUIET_S = 0.1


class DrainPhase(IntEnum):
    """A phase of the shutdown."""

    SERVING = 0
    DRAINING = 1
    CLOSING = 2
    OVER = 3


class Drain:
    """The phase of a gateway, and the requests that are open in it."""

    def __init__(self) -> None:
        self.phase = DrainPhase.SERVING
        self._open: set[asyncio.Timeout] = set()
        self._listeners: set[Callable[[], None]] = set()
        self._begun = 0
        self._draining_since = self._last_arrival = 0.0  # event-loop time
        self._none_open = asyncio.Event()
        self._none_open.set()

    @property
    def draining(self) -> bool:
        """Whether the shutdown has begun."""
        return self.phase >= DrainPhase.DRAINING

    @property
    def closing(self) -> bool:
        """Whether new requests are refused."""
        return self.phase >= DrainPhase.CLOSING

    @property
    def remaining(self) -> int:
        """The open requests of a gateway that drains."""
        return len(self._open) if self.draining else 0

    @property
    def last_arrival_s(self) -> float:
        """Seconds from the drain's beginning to the last new request; 0 without one."""
        return self._last_arrival - self._draining_since

    def arrive(self) -> None:
        """Note the arrival of a request or a WebSocket; probes do not count."""
        if self.draining:
            self._last_arrival = asyncio.get_running_loop().time()

    async def silence(self, silence_s: float, most_s: float) -> None:
        """Return when no new request has come for `silence_s`, after `most_s` at the latest."""
        loop = asyncio.get_running_loop()
        latest = loop.time() + most_s
        while (wait_s := min(self._last_arrival + silence_s, latest) - loop.time()) > 0:  # noqa: ASYNC110
            await asyncio.sleep(wait_s)

    def limit(self) -> AbstractAsyncContextManager[None]:
        """Count a request as open while the block runs; raises :class:`ApiError` (503) in it when the drain is over."""
        return _OpenRequest(self)

    def open(self, limit: asyncio.Timeout) -> None:
        """A request begins, which ends with an error when its limit is over; raises :class:`ApiError` (503)."""
        if self.phase is DrainPhase.OVER:
            raise shutting_down()
        self._open.add(limit)
        self._begun += 1
        self._none_open.clear()

    def close(self, limit: asyncio.Timeout) -> None:
        """A request has ended."""
        self._open.discard(limit)
        if not self._open:
            self._none_open.set()

    @contextmanager
    def listening(self, on_phase: Callable[[], None]) -> Iterator[None]:
        """Call `on_phase` at each new phase while the block runs."""
        self._listeners.add(on_phase)
        try:
            yield
        finally:
            self._listeners.discard(on_phase)

    def enter(self, phase: DrainPhase) -> None:
        """Begin a phase; phases never go back."""
        if phase <= self.phase:
            return
        if self.phase is DrainPhase.SERVING:
            self._draining_since = self._last_arrival = asyncio.get_running_loop().time()
        self.phase = phase
        for on_phase in list(self._listeners):
            on_phase()

    async def finish(self, timeout_s: float) -> None:
        """Return when no request is open; after `timeout_s` the open ones end with an error."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._quiet()
        except TimeoutError:
            log.warning("the drain's time is over, %d requests end with an error", len(self._open))
        self.enter(DrainPhase.OVER)
        now = asyncio.get_running_loop().time()
        for limit in self._open:
            limit.reschedule(now)

    async def _quiet(self) -> None:
        """Return when no request is open, and open connections have brought no further one."""
        begun = -1
        while begun != self._begun:
            await self._none_open.wait()
            begun = self._begun
            await asyncio.sleep(_QUIET_S)


class _OpenRequest(AbstractAsyncContextManager[None]):
    """See :meth:`Drain.limit`; a generator in its place would cost every request twice as much."""

    __slots__ = ("_drain", "_limit")

    def __init__(self, drain: Drain) -> None:
        self._drain = drain
        self._limit = asyncio.timeout(None)

    async def __aenter__(self) -> None:
        self._drain.open(self._limit)
        await self._limit.__aenter__()

    async def __aexit__(self, *failure: Any) -> None:
        try:
            await self._limit.__aexit__(*failure)
        except TimeoutError:
            raise shutting_down() from None
        finally:
            self._drain.close(self._limit)
