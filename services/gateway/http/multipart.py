"""Reads a form with one file while it arrives."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from services.gateway.errors import ApiError, invalid
from services.gateway.http.exchange import Exchange

_MAX_FIELD_BYTES = 1024
_MAX_PARTS = 16


@dataclass(slots=True)
class FormReader:
    """The received part of a form: fields, the file's name, and the file's bytes that were not yet passed on."""

    file_field: str
    fields: dict[str, str] = field(default_factory=dict)
    filename: str | None = None
    data: bytearray = field(default_factory=bytearray)
    complete: bool = False
    _headers: dict[bytes, bytes] = field(default_factory=dict)
    _header: tuple[bytearray, bytearray] = field(default_factory=lambda: (bytearray(), bytearray()))
    _name: str = ""
    _value: bytearray | None = None  # the field that is being read; None inside the file
    _parts: int = 0

    def parser(self, boundary: bytes) -> MultipartParser:
        """A parser that fills this reader."""
        return MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin,
                "on_header_field": lambda data, start, end: self._header[0].extend(data[start:end]),
                "on_header_value": lambda data, start, end: self._header[1].extend(data[start:end]),
                "on_header_end": self._end_header,
                "on_headers_finished": self._end_headers,
                "on_part_data": self._take,
                "on_part_end": self._end,
                "on_end": self._end_form,
            },
        )

    def _begin(self) -> None:
        self._headers, self._parts = {}, self._parts + 1
        if self._parts > _MAX_PARTS:
            raise invalid(f"A form may have at most {_MAX_PARTS} parts.", None, "invalid_form")

    def _end_header(self) -> None:
        name, value = self._header
        self._headers[bytes(name).lower()] = bytes(value)
        self._header = (bytearray(), bytearray())

    def _end_headers(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        self._name = options.get(b"name", b"").decode("utf-8", "replace")
        if self._name == self.file_field:
            if self.filename is not None:
                raise invalid(f"The form has more than one `{self.file_field}`.", self.file_field)
            self.filename = options.get(b"filename", b"").decode("utf-8", "replace")[:255] or self.file_field
            self._value = None
        else:
            self._value = bytearray()

    def _take(self, data: bytes, start: int, end: int) -> None:
        if self._value is None:
            self.data += data[start:end]
            return
        self._value += data[start:end]
        if len(self._value) > _MAX_FIELD_BYTES:
            message = f"`{self._name[:64]}` may have at most {_MAX_FIELD_BYTES} bytes."
            raise invalid(message, self._name[:64])

    def _end(self) -> None:
        if self._value is not None:
            self.fields[self._name[:64]] = self._value.decode("utf-8", "replace")

    def _end_form(self) -> None:
        self.complete = True


async def read_form(exchange: Exchange, form: FormReader, *, max_bytes: int, patience_s: float) -> AsyncIterator[bytes]:
    """Read a form into `form` and yield the file's bytes; raises :class:`ApiError` 415, 413, 408 or 400.

    `patience_s` is the longest pause that a client may make.
    """
    parser = form.parser(_boundary(exchange))
    async for piece in _patiently(exchange.pieces(max_bytes), patience_s):
        try:
            parser.write(piece)
        except FormParserError as error:
            raise invalid(f"The form cannot be read: {error}", None, "invalid_form") from error
        if form.data:
            yield bytes(form.data)
            form.data.clear()
    if not form.complete:
        raise invalid("The form is not complete.", None, "invalid_form")


def _boundary(exchange: Exchange) -> bytes:
    kind, options = parse_options_header(exchange.header(b"content-type"))
    if kind != b"multipart/form-data" or not options.get(b"boundary"):
        message = "The body must be multipart/form-data with a boundary (header Content-Type)."
        raise ApiError(415, message, "invalid_request_error", code="unsupported_media_type")
    if exchange.header(b"content-encoding").strip().lower() not in ("", "identity"):
        message = "A form may not be compressed (header Content-Encoding)."
        raise ApiError(415, message, "invalid_request_error", code="unsupported_content_encoding")
    return options[b"boundary"]


async def _patiently(pieces: AsyncIterator[bytes], patience_s: float) -> AsyncIterator[bytes]:
    while True:
        try:
            async with asyncio.timeout(patience_s):
                piece = await anext(pieces, None)
        except TimeoutError as error:
            text = f"Nothing of the form arrived for {patience_s:g} s."
            raise ApiError(408, text, "invalid_request_error", code="body_timeout") from error
        if piece is None:
            return
        yield piece
