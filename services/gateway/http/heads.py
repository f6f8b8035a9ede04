"""Reads the heads of requests, which must arrive in time and be of limited size."""

from __future__ import annotations

import asyncio

from services.gateway.errors import ApiError
from services.gateway.http.upgrade import UpgradeProtocol

_BETWEEN = 4  # ": " and CR LF


class _TooLargeError(Exception):
    """Ends the parsing of a head that is too large."""


class HeadProtocol(UpgradeProtocol):
    """HTTP that closes connections whose request head does not arrive in time (slow loris), or is too large.

    A connection without any data counts as idle, since proxies open connections in advance.
    """

    head_timeout_s = 10.0
    max_head_fields = 128
    max_head_bytes = 64 * 1024
    too_large: ApiError | None = None  # why the head is refused
    _head_timer: asyncio.TimerHandle | None = None
    _head_bytes = 0  # of an incomplete head, less what came with its first byte

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
                self.too_large = self._refusal()
                self.send_400_response("")

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self._arm()

    def on_headers_complete(self) -> None:
        """The head is complete."""
        self._disarm()
        size = len(self.url) + sum(len(name) + len(value) + _BETWEEN for name, value in self.headers)
        if size > self.max_head_bytes or len(self.headers) > self.max_head_fields:
            self.too_large = self._refusal()
            raise _TooLargeError
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is closed."""
        self._disarm()
        super().connection_lost(exc)

    def _refusal(self) -> ApiError:
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
