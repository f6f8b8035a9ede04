"""Requests to this gateway's own routes without a connection."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from services.gateway.asgi import ASGIApp, ASGIMessage, Headers, Scope

_NONE: Mapping[str, object] = {}
_DONE = b"data: [DONE]"


async def post(
    routes: ASGIApp,
    path: str,
    headers: Headers,
    body: bytes,
    send: Callable[[ASGIMessage], Awaitable[None]],
    more: Mapping[str, object] = _NONE,
) -> None:
    """Send one request; `send` gets its answer. It has no client that disconnects: a cancellation abandons it.

    `more`: further entries of the request's scope. Call it in a task that serves only this request, since the task's
    context holds the request's log fields and trace.
    """
    messages: list[ASGIMessage] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> ASGIMessage:
        if messages:
            return messages.pop()
        return await asyncio.Future[ASGIMessage]()

    scope: Scope = {"type": "http", "http_version": "1.1", "method": "POST", "path": path, "headers": headers, **more}
    await routes(scope, receive, send)


class EventReader:
    """Reads server-sent events as they arrive."""

    def __init__(self) -> None:
        self._held = b""

    def read(self, data: bytes) -> list[bytes]:
        """The data of the events that are complete; comments and the mark of the end are dropped."""
        *blocks, self._held = (self._held + data).split(b"\n\n")
        lines = (line for block in blocks for line in block.split(b"\n"))
        return [line.removeprefix(b"data: ") for line in lines if line.startswith(b"data: ") and line != _DONE]
