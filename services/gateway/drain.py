"""How a gateway ends without failing anybody.

    serving -> draining (not ready, all else as before, for the delay and until no new request has come for a while)
            -> closing  (nobody new; what is open may go on until the deadline)
            -> over     (what is still open is told so)

A load balancer needs the first step: it goes on sending until it has heard that this gateway is not ready. On a busy
machine it hears late, so requests that still come prolong the step.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from enum import IntEnum

from services.gateway.errors import shutting_down

log = logging.getLogger(__name__)

# After the deadline: to send everybody the error that ends his request, and to exchange the last frames.
LAST_WORDS_S = 2.0
# A request that was on its way when the last one ended is answered, too.
_QUIET_S = 0.1


class Phase(IntEnum):
    """How far the end has come."""

    SERVING = 0
    DRAINING = 1
    CLOSING = 2
    OVER = 3


class Drain:
    """The phase of a gateway, and the requests that are open in it."""

    def __init__(self) -> None:
        self.phase = Phase.SERVING
        self._open: set[asyncio.Timeout] = set()
        self._listeners: set[Callable[[], None]] = set()
        self._begun = 0
        self._draining_since = self._last_arrival = 0.0  # event-loop time
        self._none_open = asyncio.Event()
        self._none_open.set()

    @property
    def draining(self) -> bool:
        """Whether the gateway has been told to end."""
        return self.phase >= Phase.DRAINING

    @property
    def closing(self) -> bool:
        """Whether nobody new is let in."""
        return self.phase >= Phase.CLOSING

    @property
    def remaining(self) -> int:
        """Requests that a gateway that is draining still answers."""
        return len(self._open) if self.draining else 0

    @property
    def last_arrival_s(self) -> float:
        """How long after the drain's beginning the last new request came; 0 while none has."""
        return self._last_arrival - self._draining_since

    def arrive(self) -> None:
        """A new request, or a new WebSocket, has come; probes are none."""
        if self.draining:
            self._last_arrival = asyncio.get_running_loop().time()

    async def silence(self, silence_s: float, most_s: float) -> None:
        """Return when no new request has come for `silence_s`, after `most_s` at the latest."""
        loop = asyncio.get_running_loop()
        latest = loop.time() + most_s
        while (wait_s := min(self._last_arrival + silence_s, latest) - loop.time()) > 0:  # noqa: ASYNC110
            await asyncio.sleep(wait_s)

    @asynccontextmanager
    async def limit(self) -> AsyncIterator[None]:
        """A request runs in the block; raises :class:`ApiError` (503) in it when the drain is over."""
        if self.phase is Phase.OVER:
            raise shutting_down()
        limit = asyncio.timeout(None)
        self._open.add(limit)
        self._begun += 1
        self._none_open.clear()
        try:
            async with limit:
                yield
        except TimeoutError:
            if not limit.expired():
                raise
            raise shutting_down() from None
        finally:
            self._open.discard(limit)
            if not self._open:
                self._none_open.set()

    @contextmanager
    def listening(self, on_phase: Callable[[], None]) -> Iterator[None]:
        """Call `on_phase` at every new phase while the block runs."""
        self._listeners.add(on_phase)
        try:
            yield
        finally:
            self._listeners.discard(on_phase)

    def enter(self, phase: Phase) -> None:
        """Begin a phase; a phase that is past is not entered again."""
        if phase <= self.phase:
            return
        if self.phase is Phase.SERVING:
            self._draining_since = self._last_arrival = asyncio.get_running_loop().time()
        self.phase = phase
        for on_phase in list(self._listeners):
            on_phase()

    async def finish(self, timeout_s: float) -> None:
        """Return when nothing is open any more; what still is after `timeout_s` ends with its error."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._quiet()
        except TimeoutError:
            log.warning("the drain's time is over, %d requests end with an error", len(self._open))
        self.enter(Phase.OVER)
        now = asyncio.get_running_loop().time()
        for limit in self._open:
            limit.reschedule(now)

    async def _quiet(self) -> None:
        """Until nothing is open, and nothing has come meanwhile over connections that still are."""
        begun = -1
        while begun != self._begun:
            await self._none_open.wait()
            begun = self._begun
            await asyncio.sleep(_QUIET_S)
