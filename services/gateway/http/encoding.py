"""Decompresses request bodies."""

from __future__ import annotations

import asyncio
import zlib

from services.gateway.errors import ApiError, invalid, too_large

_ENCODINGS = ("gzip", "x-gzip", "deflate")
_GZIP_OR_ZLIB = 47  # wbits for both formats: zlib detects the header


async def inflate(data: bytes, encoding: str, max_bytes: int) -> bytes:
    """Decompress a body off the event loop; raises :class:`ApiError` 415, 413 or 400."""
    if encoding not in _ENCODINGS:
        message = f"A body may be encoded as gzip or deflate, not as {encoding} (header Content-Encoding)."
        headers = (("accept-encoding", "gzip, deflate"),)
        raise ApiError(415, message, "invalid_request_error", code="unsupported_content_encoding", headers=headers)
    return await asyncio.to_thread(_inflate, data, encoding, max_bytes)


def _inflate(data: bytes, encoding: str, max_bytes: int) -> bytes:
    decoder = zlib.decompressobj(_GZIP_OR_ZLIB)
    try:
        body = decoder.decompress(data, max_bytes + 1)
    except zlib.error as error:
        raise invalid(f"The body is not valid {encoding}: {error}", code="invalid_encoding") from error
    if len(body) > max_bytes:
        raise too_large(max_bytes)
    if not decoder.eof or decoder.unused_data:
        raise invalid(f"The body is not one whole {encoding} stream.", code="invalid_encoding")
    return body
