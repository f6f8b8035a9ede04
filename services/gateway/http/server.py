"""The HTTP server: uvicorn inside a service that handles signals itself, with limits on slow heads and slow readers."""

from __future__ import annotations

import asyncio
import select
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any

import msgspec
import uvicorn
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from services.common.lifecycle import StartupError
from services.gateway.asgi import ASGIApp
from services.gateway.drain import LAST_WORDS_S, Drain
from services.gateway.errors import invalid
from services.gateway.http.upgrade import UpgradeProtocol
from services.gateway.observation import request_id_of
from services.gateway.settings import GatewaySettings

_BACKLOG = 4096
_OLD = "1.0"
_NO_HANDSHAKE = "A WebSocket is opened by a GET request without a body."
_FIRST_WATCH_S, _LONGEST_WATCH_S = 0.02, 1.0  # of connections whose clients send nothing more


class HeadTimeoutProtocol(UpgradeProtocol):
    """HTTP, closing connections whose request head does not arrive in time (slow loris).

    A connection that has sent nothing yet is an idle one like any other: proxies open some for later.
    """

    head_timeout_s = 10.0
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has connected."""
        super().connection_made(transport)
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def data_received(self, data: bytes) -> None:
        """Something of a request, be it an empty line."""
        if self.cycle is None or self.cycle.response_complete:
            self._arm()
        super().data_received(data)

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self._arm()

    def on_headers_complete(self) -> None:
        """The head is complete."""
        self._disarm()
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has gone."""
        self._disarm()
        super().connection_lost(exc)

    def _arm(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self.head_timeout_s, self._expire)

    def _disarm(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _expire(self) -> None:
        if not self.transport.is_closing():
            self.transport.close()


class SendTimeout(asyncio.Protocol):
    """Drops a client that reads nothing while its answer waits: it holds a request's place as long as it lives.

    Costs nothing while clients read: the time runs only while the transport's buffer is full (64 KiB).
    """

    send_timeout_s = 60.0
    _send_timer: asyncio.TimerHandle | None = None
    loop: asyncio.AbstractEventLoop
    transport: asyncio.Transport

    def pause_writing(self) -> None:
        """The buffer is full."""
        super().pause_writing()
        self._send_timer = self.loop.call_later(self.send_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        """The client has read."""
        self._end_wait()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has gone."""
        self._end_wait()
        super().connection_lost(exc)

    def _end_wait(self) -> None:
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None


class HalfClosed(HeadTimeoutProtocol):
    """A client may close its sending side after its request and still gets the answer.

    One that has gone altogether looks the same, until something is sent: its machine then answers with a reset. So an
    interim response is sent that means nothing, and the connection is watched.
    """

    _watch_s = 0.0

    def eof_received(self) -> bool:  # type: ignore[override]  # uvicorn's closes always
        """The client sends nothing more; returns whether it still gets something."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete or cycle.more_body:
            return False
        if not self._watch_s:
            cycle.keep_alive = False  # it is the last one
            if not (cycle.response_started or self.pipeline or cycle.scope["http_version"] == _OLD):
                self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self._watch_s = _FIRST_WATCH_S
            self._watch()
        return True

    def _watch(self) -> None:
        """Look again and again: nobody reads from the connection any more, and would notice a reset."""
        if self.transport.is_closing():
            return
        poll = select.poll()
        poll.register(self.transport.get_extra_info("socket").fileno(), 0)  # errors are always told
        if poll.poll(0):
            self.transport.abort()
        else:
            self.loop.call_later(self._watch_s, self._watch)
            self._watch_s = min(2 * self._watch_s, _LONGEST_WATCH_S)


def _end_with_connection(cycle: RequestResponseCycle) -> None:
    """HTTP/1.0 knows no chunks: an answer without a length lasts until its connection is closed."""
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

    cycle.send = send  # type: ignore[method-assign]  # uvicorn chunks whatever it is told


def _bad_request(message: str) -> bytes:
    """The whole answer to what no route could read."""
    body = msgspec.json.encode(invalid(message, code="invalid_http_request").body())
    head = "HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nconnection: close\r\n"
    return f"{head}x-request-id: {request_id_of('')}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


class HttpProtocol(SendTimeout, HalfClosed):
    """HTTP with both limits. While the gateway drains, answers say that their connection ends with them.

    Clients then open their next one elsewhere. An answer that has begun can't say it any more: its connection stays
    open, since closing it would lose the request that the client sends over it next.
    """

    drain: Drain

    def on_headers_complete(self) -> None:
        """The head is complete."""
        super().on_headers_complete()
        if self.cycle is not None and self.cycle.scope is self.scope and self.scope["http_version"] == _OLD:
            _end_with_connection(self.cycle)
        if self.drain.draining:
            self.announce_close()

    def send_400_response(self, msg: str) -> None:
        """What has come is no HTTP: say so in the shape of all errors, unless another answer is under way."""
        if self.cycle is None or self.cycle.response_complete:
            self.transport.write(_bad_request("The HTTP request cannot be read: it breaks the protocol."))
        self.transport.close()

    def handle_websocket_upgrade(self) -> None:
        """A request for a WebSocket."""
        if self.scope["method"] == "GET":
            super().handle_websocket_upgrade()
        else:
            self.transport.write(_bad_request(_NO_HANDSHAKE))
            self.transport.close()

    def announce_close(self) -> None:
        """Make the answer of the request that runs the last one, unless it has begun."""
        if self.cycle is not None and not self.cycle.response_started:
            self.cycle.keep_alive = False


class WebSocketProtocol(SendTimeout, WebSocketsSansIOProtocol):
    """WebSocket with a limit on slow readers. A handshake that cannot be read is refused, which uvicorn leaves out."""

    def data_received(self, data: bytes) -> None:
        """The handshake, or frames."""
        super().data_received(data)
        if self.conn.handshake_exc is not None and not self.handshake_initiated:
            self.transport.write(_bad_request(_NO_HANDSHAKE))
            self.transport.close()


class HttpServer(uvicorn.Server):
    """A uvicorn server whose signals are handled by :func:`services.common.lifecycle.run_service`.

    uvicorn's own end closes connections on which a request may just be arriving; here it has four steps.
    """

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the process's signal handlers alone."""
        yield

    def announce_close(self) -> None:
        """Let answers that have not begun be the last of their connections."""
        for connection in self.server_state.connections:
            if isinstance(connection, HttpProtocol):
                connection.announce_close()

    def stop_listening(self) -> None:
        """Accept nobody new; connections stay."""
        for server in self.servers:
            server.close()

    def stop(self) -> None:
        """Close all connections: requests have ended, or are ending with an error."""
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """What :meth:`stop` leads to."""
        self.stop_listening()
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORDS_S):
                while self.server_state.tasks:  # noqa: ASYNC110  # they are uvicorn's
                    await asyncio.sleep(0.01)
                for connection in list(self.server_state.connections):
                    connection.shutdown()
                while self.server_state.connections:  # noqa: ASYNC110  # what was written goes out first
                    await asyncio.sleep(0.01)
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        for server in self.servers:
            await server.wait_closed()

    @property
    def port(self) -> int:
        """The port that was bound; 0 before the start."""
        return int(self.servers[0].sockets[0].getsockname()[1]) if self.started else 0


def listen(settings: GatewaySettings) -> socket.socket:
    """The listening socket of a server; raises :class:`StartupError`, where uvicorn would end the process itself."""
    host, port = settings.host, settings.gateway_port
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise StartupError(f"cannot listen on {host}:{port}: {error}") from error


def new_http_server(app: ASGIApp, settings: GatewaySettings, drain: Drain) -> HttpServer:
    """A server for the app; serve it with ``await server.serve([listen(settings)])``."""
    reading = {"send_timeout_s": settings.send_timeout_s}
    options: dict[str, Any] = {
        "http": type("Http", (HttpProtocol,), {"head_timeout_s": settings.header_timeout_s, "drain": drain} | reading),
        "ws": type("WebSocket", (WebSocketProtocol,), reading),
        "ws_max_size": settings.max_body_bytes,
        "lifespan": "off",
        "log_config": None,
        "log_level": "info",  # below that, whole WebSocket frames are logged: prompts
        "access_log": False,
        "server_header": False,
        "proxy_headers": False,  # nothing here depends on the client's address
        "timeout_keep_alive": settings.keep_alive_s,
        "backlog": _BACKLOG,
    }
    return HttpServer(uvicorn.Config(app, **options))


@asynccontextmanager
async def serving_http(routes: ASGIApp, settings: GatewaySettings, drain: Drain) -> AsyncIterator[HttpServer]:
    """Serve while the block runs."""
    listener = listen(settings)
    server = new_http_server(routes, settings, drain)
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
