"""The HTTP server: uvicorn inside a service that handles signals itself, with limits on slow heads and slow readers."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from services.common.lifecycle import StartupError
from services.gateway.api.front import ASGIApp
from services.gateway.settings import GatewaySettings

_BACKLOG = 4096


class HeadTimeoutProtocol(HttpToolsProtocol):
    """uvicorn's protocol, closing connections whose request head does not arrive in time (slow loris)."""

    head_timeout_s = 10.0
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has connected."""
        super().connection_made(transport)
        self._arm()

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


class HttpProtocol(SendTimeout, HeadTimeoutProtocol):
    """HTTP with both limits."""


class WebSocketProtocol(SendTimeout, WebSocketsSansIOProtocol):
    """WebSocket with a limit on slow readers."""


class HttpServer(uvicorn.Server):
    """A uvicorn server whose signals are handled by :func:`services.common.lifecycle.run_service`."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the process's signal handlers alone."""
        yield

    def stop(self) -> None:
        """Finish open requests, take no new ones."""
        self.should_exit = True

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


def new_http_server(app: ASGIApp, settings: GatewaySettings) -> HttpServer:
    """A server for the app; serve it with ``await server.serve([listen(settings)])``."""
    reading = {"send_timeout_s": settings.send_timeout_s}
    options: dict[str, Any] = {
        "http": type("Http", (HttpProtocol,), {"head_timeout_s": settings.header_timeout_s} | reading),
        "ws": type("WebSocket", (WebSocketProtocol,), reading),
        "ws_max_size": settings.max_body_bytes,
        "lifespan": "off",
        "log_config": None,
        "log_level": "info",  # below that, whole WebSocket frames are logged: prompts
        "access_log": False,
        "server_header": False,
        "proxy_headers": False,  # nothing here depends on the client's address
        "timeout_keep_alive": 75,  # longer than the idle time of common ingress controllers, who must close first
        "timeout_graceful_shutdown": int(settings.drain_timeout_s),
        "backlog": _BACKLOG,
    }
    return HttpServer(uvicorn.Config(app, **options))
