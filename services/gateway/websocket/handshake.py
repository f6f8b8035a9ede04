"""Routes WebSocket handshakes, and refuses them."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from services.gateway.asgi import JSON, ASGIApp, Receive, Scope, Send, header
from services.gateway.errors import ApiError
from services.gateway.observation import request_id_of


class Sockets:
    """The ASGI app of all WebSockets, by path."""

    def __init__(self, by_path: Mapping[str, ASGIApp]) -> None:
        self._by_path = by_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        socket = self._by_path.get(scope["path"])
        if socket is not None:
            await socket(scope, receive, send)
            return
        await receive()  # websocket.connect
        message = f"There is no WebSocket at {scope['path'][:200]}. There is one at: {', '.join(self._by_path)}."
        await refuse(scope, send, ApiError(404, message, "invalid_request_error", code="not_found"))


async def refuse(scope: Scope, send: Send, error: ApiError) -> None:
    """Refuse the handshake with an HTTP error."""
    request_id = request_id_of(header(scope, b"x-request-id"))
    headers = [JSON, (b"x-request-id", request_id.encode("latin-1"))]
    await send({"type": "websocket.http.response.start", "status": error.status, "headers": headers})
    await send({"type": "websocket.http.response.body", "body": msgspec.json.encode(error.body())})
