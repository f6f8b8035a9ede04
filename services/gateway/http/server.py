"""The HTTP server: uvicorn without its signal handlers, with limits on request heads and slow readers."""

from __future__ import annotations

import asyncio
import select
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from http import HTTPStatus
from typing import Any

import msgspec
import uvicorn
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from services.common.lifecycle import StartupError
from services.gateway.asgi import ASGIApp
from services.gateway.drain import LAST_WORDS_S, Drain
from services.gateway.errors import ApiError, invalid
from services.gateway.http.heads import INVALID, OLD_VERSION, HeadProtocol
from services.gateway.observation import request_id_of
from services.gateway.public_tls import PublicTls
from services.gateway.settings import GatewaySettings

_BACKLOG = 4096
_NO_REQUEST = invalid("The HTTP request cannot be read: it breaks the protocol.", code=INVALID)
_NO_HANDSHAKE = invalid("A WebSocket is opened by a GET request without a body.", code=INVALID)
_FIRST_WATCH_S, _LONGEST_WATCH_S = 0.02, 1.0  # pauses between looks at a half-closed connection


class SendTimeout(asyncio.Protocol):
    """Drops a client that does not read its answer, since its request occupies a place until it ends.

    A timer runs only while the transport's buffer (64 KiB) is full, so clients that read cost nothing.
    """

    send_timeout_s = 60.0
    _send_timer: asyncio.TimerHandle | None = None
    loop: asyncio.AbstractEventLoop
    transport: asyncio.Transport

    def pause_writing(self) -> None:
        """The buffer is full: start the timer."""
        super().pause_writing()
        self._send_timer = self.loop.call_later(self.send_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        """The client has read: stop the timer."""
        self._end_wait()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is closed."""
        self._end_wait()
        super().connection_lost(exc)

    def _end_wait(self) -> None:
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None


class HalfClosed(HeadProtocol):
    """Answers a client that closes its sending side after its request.

    A client that has closed the connection looks the same until the server sends something, which is answered with a
    reset. So the server sends an interim response without meaning, and watches the connection for a reset.
    """

    _watch_s = 0.0

    def eof_received(self) -> bool:  # type: ignore[override]  # uvicorn always closes
        """The client has closed its sending side; returns whether to keep the connection open."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete or cycle.more_body:
            return False
        if not self._watch_s:
            cycle.keep_alive = False  # no further request can come
            if not (cycle.response_started or self.pipeline or cycle.scope["http_version"] == OLD_VERSION):
                self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self._watch_s = _FIRST_WATCH_S
            self._watch()
        return True

    def _watch(self) -> None:
        """Poll the connection, since asyncio no longer reads from it and would not notice a reset."""
        if self.transport.is_closing():
            return
        poll = select.poll()
        poll.register(self.transport.get_extra_info("socket").fileno(), 0)  # poll() always reports errors
        if poll.poll(0):
            self.transport.abort()
        else:
            self.loop.call_later(self._watch_s, self._watch)
            self._watch_s = min(2 * self._watch_s, _LONGEST_WATCH_S)


def _end_with_connection(cycle: RequestResponseCycle) -> None:
    """End an HTTP/1.0 answer without a length by closing the connection, since HTTP/1.0 has no chunks."""
    pass_on, unknown = cycle.send, False

    async def send(message: Any) -> None:
        nonlocal unknown
        if message["type"] == "http.response.start":
            unknown = all(name.lower() != b"content-length" for name, _ in message.get("headers", ()))
            if unknown:
                cycle.chunked_encoding, cycle.keep_alive = False, False
        elif unknown and message["type"] == "http.response.body":
            cycle.expected_content_length = len(message.get("body", b""))
        await pass_on(message)

    cycle.send = send  # type: ignore[method-assign]  # uvicorn would send chunks


def _refusal(error: ApiError) -> bytes:
    """The answer to what is no request for the routes, over a connection that is closed then."""
    body = msgspec.json.encode(error.body())
    status = HTTPStatus(error.status)
    head = f"HTTP/1.1 {status} {status.phrase}\r\ncontent-type: application/json\r\nconnection: close\r\n"
    return f"{head}x-request-id: {request_id_of('')}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


class HttpProtocol(SendTimeout, HalfClosed):
    """HTTP with both limits. While the gateway drains, answers carry `Connection: close`.

    Clients then open their next connection to another gateway. An answer that has begun cannot carry the header any
    more: its connection stays open, since closing it could lose the client's next request.
    """

    drain: Drain

    def on_headers_complete(self) -> None:
        """The head is complete."""
        super().on_headers_complete()
        if self.cycle is not None and self.cycle.scope is self.scope and self.scope["http_version"] == OLD_VERSION:
            _end_with_connection(self.cycle)
        if self.drain.draining:
            self.announce_close()

    def send_400_response(self, msg: str) -> None:
        """Answer what is refused before routing with an error in the common shape, unless another answer has begun."""
        cycle = self.cycle
        within_body = cycle is not None and cycle.more_body and not (cycle.response_started or self.pipeline)
        if cycle is None or cycle.response_complete or within_body:
            self.transport.write(_refusal(self.refusal or _NO_REQUEST))
        self.transport.close()

    def handle_websocket_upgrade(self) -> None:
        """A request asks for a WebSocket."""
        if self.scope["method"] == "GET":
            super().handle_websocket_upgrade()
        else:
            self.transport.write(_refusal(_NO_HANDSHAKE))
            self.transport.close()

    def announce_close(self) -> None:
        """Make the running request's answer the connection's last one, unless it has begun."""
        if self.cycle is not None and not self.cycle.response_started:
            self.cycle.keep_alive = False


class WebSocketProtocol(SendTimeout, WebSocketsSansIOProtocol):
    """WebSocket with a limit on slow readers. It answers an invalid handshake, which uvicorn does not."""

    def data_received(self, data: bytes) -> None:
        """A part of the handshake or of a frame has arrived."""
        super().data_received(data)
        if self.conn.handshake_exc is not None and not self.handshake_initiated:
            self.transport.write(_refusal(_NO_HANDSHAKE))
            self.transport.close()


class HttpServer(uvicorn.Server):
    """A uvicorn server without signal handlers: :func:`services.common.lifecycle.run_service` has them.

    uvicorn's own shutdown closes connections on which a request may be arriving; this one has four steps.
    """

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Keep the process's signal handlers."""
        yield

    def announce_close(self) -> None:
        """Make answers that have not begun the last ones of their connections."""
        for connection in self.server_state.connections:
            if isinstance(connection, HttpProtocol):
                connection.announce_close()

    def stop_listening(self) -> None:
        """Accept no new connections; open ones stay."""
        for server in self.servers:
            server.close()

    def stop(self) -> None:
        """Close all connections, after requests have ended."""
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close connections, called by uvicorn after :meth:`stop`."""
        self.stop_listening()
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORDS_S):
                while self.server_state.tasks:  # noqa: ASYNC110  # uvicorn has no event for it
                    await asyncio.sleep(0.01)
                for connection in list(self.server_state.connections):
                    connection.shutdown()
                while self.server_state.connections:  # noqa: ASYNC110  # wait until written data is sent
                    await asyncio.sleep(0.01)
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        for server in self.servers:
            await server.wait_closed()

    @property
    def port(self) -> int:
        """The bound port; 0 before the start."""
        return int(self.servers[0].sockets[0].getsockname()[1]) if self.started else 0


def listen(host: str, port: int) -> socket.socket:
    """Open the listening socket; raises :class:`StartupError`, where uvicorn would exit the process."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise StartupError(f"cannot listen on {host}:{port}: {error}") from error
    # For its connections: head and body are two writes, and clients acknowledge the first up to 40 ms late.
    # uvloop sets it itself, asyncio only where the socket's protocol number is given.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def new_http_server(app: ASGIApp, settings: GatewaySettings, drain: Drain, tls: PublicTls | None) -> HttpServer:
    """A server for the app; serve it with ``await server.serve([listen(host, port)])``."""
    reading = {"send_timeout_s": settings.send_timeout_s}
    options: dict[str, Any] = {
        "http": type("Http", (HttpProtocol,), {"drain": drain, "head_timeout_s": settings.header_timeout_s, **reading}),
        "ws": type("WebSocket", (WebSocketProtocol,), reading),
        "ws_max_size": settings.max_body_bytes,
        "lifespan": "off",
        "log_config": None,
        "log_level": "info",  # the level `debug` logs whole WebSocket frames, with prompts
        "access_log": False,
        "server_header": False,
        "proxy_headers": False,  # the gateway does not use the client's address
        "timeout_keep_alive": settings.keep_alive_s,
        "backlog": _BACKLOG,
    }
    if tls is not None:
        options["ssl_context_factory"] = lambda *_: tls.context
    return HttpServer(uvicorn.Config(app, **options))


@asynccontextmanager
async def serving_http(
    routes: ASGIApp, settings: GatewaySettings, drain: Drain, address: tuple[str, int], tls: PublicTls | None = None
) -> AsyncIterator[HttpServer]:
    """Serve at `address` (host and port) while the block runs."""
    listener = listen(*address)
    server = new_http_server(routes, settings, drain, tls)
    serving = asyncio.create_task(server.serve([listener]))
    while not server.started:
        if serving.done():
            raise StartupError("the HTTP server ended at its start") from serving.exception()
        await asyncio.sleep(0.01)
    try:
        yield server
    finally:
        server.stop()
        await serving
