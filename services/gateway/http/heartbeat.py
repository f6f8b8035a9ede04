"""Heartbeats of a silent stream, so that proxies keep it open: a comment, or an event that clients ignore.

A stream that waits for a model's start says meanwhile how far that is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType

import msgspec
from ryzanstein.v1 import routing_pb2

from services.gateway.generation.waiting import waiting_json
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
        self._saying: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Heartbeat:
        self._exchange.sent_at = self._loop.time()
        self._wait()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        for task in (self._beat, self._saying):
            if task is not None:
                task.cancel()

    def say(self, start: routing_pb2.ModelStart, *, as_event: bool) -> None:
        """Send how far a model's start is, as a comment or as an event; left out while the client does not read."""
        if self._saying is None or self._saying.done():
            self._saying = self._loop.create_task(self._put(_waiting_event(start) if as_event else _waiting(start)))

    async def _put(self, frames: bytes) -> None:
        exchange = self._exchange
        if not exchange.status:
            await exchange.start_events()
        if exchange.streaming and not exchange.complete:  # an answer or an error may have come meanwhile
            await exchange.send_events(frames)

    def _wait(self) -> None:
        self._timer = self._loop.call_at(self._exchange.sent_at + self._every_s, self._due)

    def _due(self) -> None:
        if self._loop.time() < self._exchange.sent_at + self._every_s:
            self._beats = 0
            self._wait()
        else:
            self._beat = self._loop.create_task(self._send())

    async def _send(self) -> None:
        if not self._exchange.complete:
            self._beats += 1
            due = self._beats >= min(_BEATS, _EVENT_S / self._every_s)
            event = self._event() if due else b""
            if event:
                self._beats = 0
            await self._put(event or self._exchange.dialect.heartbeat)
            self._wait()


def _waiting(start: routing_pb2.ModelStart) -> bytes:
    """A comment. A blank line behind it would be an empty event to some clients."""
    fields = waiting_json(start)
    seconds = f" {fields['estimate_s']}s" if fields["estimate_s"] else ""
    return f": waiting {fields['stage']}{seconds}\n".encode()


def _waiting_event(start: routing_pb2.ModelStart) -> bytes:
    return b"event: ryzanstein.waiting\ndata: " + msgspec.json.encode(waiting_json(start)) + b"\n\n"
