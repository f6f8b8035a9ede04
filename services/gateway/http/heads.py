"""Reads the heads of requests, which must arrive in time, be of limited size, and say one thing only."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence

from services.gateway.errors import ApiError, invalid
from services.gateway.http.upgrade import UpgradeProtocol

OLD_VERSION = "1.0"
INVALID = "invalid_http_request"
_VERSIONS = (OLD_VERSION, "1.1")
_HOST = re.compile(rb"(\[[\w.~:%-]+\]|[\w.~%!$&'()*+;=-]*)(:[0-9]{0,5})?", re.ASCII)  # RFC 3986, 3.2.2
_BETWEEN = 4  # ": " and CR LF


class _RefusedError(Exception):
    """Ends the parsing of a head that is refused."""


def _trouble(version: str, url: bytes, fields: Sequence[tuple[bytes, bytes]]) -> str:
    """Return what the parser accepts and RFC 9112 does not; empty if there is nothing."""
    by_name: dict[bytes, list[bytes]] = {b"host": [], b"transfer-encoding": [], b"upgrade": []}
    for name, value in fields:
        if name in by_name:
            by_name[name].append(value.strip().lower())
    hosts, codings, upgrades = by_name.values()
    old = version == OLD_VERSION
    if version not in _VERSIONS:
        return f"its version is HTTP/{version}, and HTTP/1.0 and HTTP/1.1 are served"
    if len(hosts) > 1 or not (hosts or old):
        return f"it has {len(hosts)} `Host` fields, and one is needed"
    if hosts and not _HOST.fullmatch(hosts[0]):
        return "its `Host` is not a name or an address with an optional port"
    if codings and (old or codings != [b"chunked"]):
        return "`Transfer-Encoding` may only be `chunked`, in HTTP/1.1"
    if old and b"websocket" in upgrades:
        return "a WebSocket needs HTTP/1.1"
    return "its target has a fragment (`#`)" if b"#" in url else ""


class HeadProtocol(UpgradeProtocol):
    """HTTP that closes connections whose request head does not arrive in time (slow loris), or is too large.

    A connection without any data counts as idle, since proxies open connections in advance.
    """

    head_timeout_s = 10.0
    max_head_fields = 128
    max_head_bytes = 64 * 1024
    refusal: ApiError | None = None  # why the head is refused
    _within_head = False
    _head_timer: asyncio.TimerHandle | None = None
    _head_bytes = 0  # bytes of an incomplete head, without the chunk of its first byte

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has connected."""
        super().connection_made(transport)
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def data_received(self, data: bytes) -> None:
        """A part of a request has arrived."""
        within = self._head_timer
        if self.cycle is None or self.cycle.response_complete:
            self._arm()
        super().data_received(data)
        if within is not None and within is self._head_timer:
            self._head_bytes += len(data)
            if self._head_bytes > self.max_head_bytes and not self.transport.is_closing():
                self.refusal = self._too_large()
                self.send_400_response("")

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self._within_head = True
        self._arm()

    def on_header(self, name: bytes, value: bytes) -> None:
        """A field is complete: of the head, or of the trailer, which must not change the head and is dropped."""
        if self._within_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head is complete."""
        self._within_head = False
        self._disarm()
        size = len(self.url) + sum(len(name) + len(value) + _BETWEEN for name, value in self.headers)
        if size > self.max_head_bytes or len(self.headers) > self.max_head_fields:
            self.refusal = self._too_large()
        elif trouble := _trouble(self.parser.get_http_version(), self.url, self.headers):
            self.refusal = invalid(f"The HTTP request breaks the protocol: {trouble}.", code=INVALID)
        if self.refusal:
            raise _RefusedError
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is closed."""
        self._disarm()
        super().connection_lost(exc)

    def _too_large(self) -> ApiError:
        allowed = f"{self.max_head_fields} header fields and {self.max_head_bytes} bytes"
        message = f"The head of the HTTP request is too large; allowed are {allowed}."
        return ApiError(431, message, "invalid_request_error", code="request_header_fields_too_large")

    def _arm(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self.head_timeout_s, self._expire)

    def _disarm(self) -> None:
        self._head_bytes = 0
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _expire(self) -> None:
        if not self.transport.is_closing():
            self.transport.close()
