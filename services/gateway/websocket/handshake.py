"""Accepts or refuses WebSocket handshakes, and brings a connection its messages until its end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import msgspec

from services.common.logs import request_id_var
from services.gateway.asgi import JSON, Receive, Scope, Send, header, headers_of
from services.gateway.drain import Drain
from services.gateway.errors import ApiError
from services.gateway.observation import request_id_of
from services.gateway.origins import OriginPolicy
from services.gateway.telemetry import GatewayMetrics

SERVICE_RESTART = 1012  # the registered close code that asks the client to reconnect
_NO_CODE = 1005


class SocketConnection(Protocol):
    """One path's API over an accepted connection."""

    async def handle(self, data: bytes | str) -> None:
        """Handle a client's message; errors become messages."""

    def wake(self) -> None:
        """Close the connection of a gateway that closes, after its last output."""

    async def end(self) -> None:
        """Release what a lost or closed connection holds."""


Connect = Callable[[Scope, Send, str], SocketConnection]  # from the handshake's scope and the connection's request id


@dataclass(frozen=True)
class Sockets:
    """The ASGI app of all WebSockets, by path."""

    by_path: Mapping[str, Connect]
    drain: Drain
    origins: OriginPolicy
    metrics: GatewayMetrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        await receive()  # websocket.connect
        request_id = request_id_of(header(headers_of(scope), b"x-request-id"))
        identified = (b"x-request-id", request_id.encode("latin-1"))
        try:
            connect = self._admit(scope)
        except ApiError as error:
            headers = [JSON, identified]
            await send({"type": "websocket.http.response.start", "status": error.status, "headers": headers})
            await send({"type": "websocket.http.response.body", "body": msgspec.json.encode(error.body())})
            return
        request_id_var.set(request_id)
        await send({"type": "websocket.accept", "headers": [identified]})
        await self._serve(connect(scope, send, request_id), receive)

    def _admit(self, scope: Scope) -> Connect:
        """The API of a handshake's path; raises :class:`ApiError` (403, 404)."""
        connect = self.by_path.get(scope["path"])
        if connect is None:
            message = f"There is no WebSocket at {scope['path'][:200]}. There is one at: {', '.join(self.by_path)}."
            raise ApiError(404, message, "invalid_request_error", code="not_found")
        self.origins.check(headers_of(scope))
        return connect

    async def _serve(self, connection: SocketConnection, receive: Receive) -> None:
        self.metrics.sockets.inc()
        code = _NO_CODE
        try:
            with self.drain.listening(connection.wake):
                connection.wake()  # the gateway may already be closing
                while (message := await receive())["type"] != "websocket.disconnect":
                    await connection.handle(message.get("text") or message.get("bytes") or b"")
            code = message.get("code", _NO_CODE)
        finally:
            self.metrics.sockets.dec()
            self.metrics.count_close(code)
            await connection.end()
