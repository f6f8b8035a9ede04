"""Heartbeats of a silent stream, so that proxies keep it open: a comment, or an event that clients ignore."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType

from services.gateway.http.exchange import Exchange

# After so many heartbeats in a row, or so many seconds, one is an event: Codex waits 300 s for one.
_BEATS, _EVENT_S = 8, 120.0


class Heartbeat:
    """Sends the dialect's heartbeat when nothing has been sent for `every_s`, while the block runs.

    The first heartbeat starts the answer; an earlier failure still gets its own status. A stream needs only one timer,
    whatever its number of tokens. Clients that count events only take a stream of comments for dead, so that a long
    silence has an event in it.
    """

    def __init__(self, exchange: Exchange, every_s: float, event: Callable[[], bytes]) -> None:
        """`event` returns an event that changes nothing; empty if there is none now."""
        self._exchange = exchange
        self._every_s = every_s
        self._event = event
        self._beats = 0  # since the last event
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle  # from the beginning of the block
        self._beat: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Heartbeat:
        self._exchange.sent_at = self._loop.time()
        self._wait()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        if self._beat is not None:
            self._beat.cancel()

    def _wait(self) -> None:
        self._timer = self._loop.call_at(self._exchange.sent_at + self._every_s, self._due)

    def _due(self) -> None:
        if self._loop.time() < self._exchange.sent_at + self._every_s:
            self._beats = 0
            self._wait()
        else:
            self._beat = self._loop.create_task(self._send())

    async def _send(self) -> None:
        exchange = self._exchange
        if not exchange.complete:
            if not exchange.status:
                await exchange.start_events()
            self._beats += 1
            due = self._beats >= min(_BEATS, _EVENT_S / self._every_s)
            event = self._event() if due else b""
            if event:
                self._beats = 0
            await exchange.send_events(event or exchange.dialect.heartbeat)
            self._wait()
