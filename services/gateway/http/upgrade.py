"""Serves requests with an `Upgrade` header: all protocols except WebSocket are ignored (RFC 9110, 7.8)."""

from __future__ import annotations

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_CONNECT = b"CONNECT"


class UpgradeProtocol(HttpToolsProtocol):
    """uvicorn's protocol, which ignores a request's `Upgrade` unless it asks for WebSocket.

    Java's client asks for `h2c` with its first request, `curl --http2` with every request. The parser stops after the
    head of such a request and would lose its body. So a new parser reads the head again without the `Upgrade` header.
    """

    def data_received(self, data: bytes) -> None:
        """Feed the parser, which would lose all bytes after a head with `Upgrade`."""
        self._unset_keepalive_if_required()
        rest = memoryview(data)
        try:
            while (offset := self._feed(rest)) is not None:
                rest = rest[offset:]
        except httptools.HttpParserError:
            self.send_400_response("")

    def _feed(self, data: memoryview) -> int | None:
        """Feed the parser; returns the end of a request's head whose upgrade is ignored."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if self._should_upgrade():
                self.handle_websocket_upgrade()
                return None
            self._read_head_again()
            return int(upgrade.args[0])
        return None

    def _read_head_again(self) -> None:
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        fields = [b"%b: %b\r\n" % (name, value) for name, value in self.headers if name != b"upgrade"]
        head = b"%b %b HTTP/%b\r\n%b\r\n" % (method, self.url, version, b"".join(fields))
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn sets it
        self.parser.feed_data(head)

    @property
    def _to_be_read_again(self) -> bool:
        return self.parser.should_upgrade() and not self._should_upgrade() and self.parser.get_method() != _CONNECT

    def on_headers_complete(self) -> None:
        """The head is complete."""
        if not self._to_be_read_again:
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        """The request is complete."""
        if not self._to_be_read_again:
            super().on_message_complete()
