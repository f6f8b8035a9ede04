"""The lines of an input file: one request each."""

from __future__ import annotations

from codecs import BOM_UTF8
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

import msgspec

from services.gateway.api.decode import explain, lone_surrogate
from services.gateway.batches.files import FileStore
from services.gateway.batches.objects import BatchError

_MOST_ERRORS = 100
_MAX_ID_CHARS = 512


class Line(msgspec.Struct, kw_only=True):
    """A request of a batch."""

    custom_id: Annotated[str, msgspec.Meta(min_length=1, max_length=_MAX_ID_CHARS)]
    method: Literal["POST"]
    url: str
    body: msgspec.Raw


class _Body(msgspec.Struct):
    stream: Any = None


read_line = msgspec.json.Decoder(Line).decode  # decoder of a valid line
_peek = msgspec.json.Decoder(_Body).decode


def streams(line: Line) -> bool:
    """Whether the request asks for a stream, which a file cannot hold."""
    try:
        return bool(_peek(line.body).stream)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False  # the endpoint refuses the body with the reason


async def numbered_lines(store: FileStore, tenant: str, file_id: str, size: int) -> AsyncIterator[tuple[int, bytes]]:
    """The lines that are not blank, with their numbers from 1; raises :class:`FileGoneError`."""
    number, rest = 0, b""
    async for piece in store.pieces(tenant, file_id, size):
        *whole, rest = (rest + piece).split(b"\n")
        for line in whole:
            number += 1
            if text := _content(number, line):
                yield number, text
    if text := _content(number + 1, rest):
        yield number + 1, text


def _content(number: int, line: bytes) -> bytes:
    """A line without the byte-order mark of the file's first line; empty when blank."""
    text = line.removeprefix(BOM_UTF8) if number == 1 else line
    return text if text.strip() else b""


class Inspector:
    """Validates all lines of a file before the first one runs."""

    def __init__(self, endpoint: str, most_requests: int, max_line_bytes: int) -> None:
        self._endpoint = endpoint
        self._most_requests = most_requests
        self._max_line_bytes = max_line_bytes
        self._seen: set[str] = set()
        self.total = 0
        self.errors: list[BatchError] = []

    def look(self, number: int, data: bytes) -> bool:
        """Validate a line; returns whether to continue."""
        self.total += 1
        if self.total > self._most_requests:
            message = f"A batch may have at most {self._most_requests} requests."
            self.errors.append(BatchError(code="too_many_requests", message=message, line=number))
            return False
        error = self._error_of(data)
        if error is not None:
            error.line = number
            self.errors.append(error)
        return len(self.errors) < _MOST_ERRORS

    def _error_of(self, data: bytes) -> BatchError | None:
        if len(data) > self._max_line_bytes:
            message = f"A line may have at most {self._max_line_bytes} bytes, this one has {len(data)}."
            return BatchError(code="line_too_long", message=message)
        try:
            line = read_line(data)
        except msgspec.ValidationError as error:
            reason = explain(error, Line)
            return BatchError(code=reason.code or "invalid_value", message=reason.message, param=reason.param)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            lone = lone_surrogate(data)
            message = lone.message if lone else f"This line is not valid JSON: {error}"
            return BatchError(code="invalid_json_line", message=message)
        if line.url != self._endpoint:
            message = f"`url` must be the batch's endpoint, {self._endpoint}."
            return BatchError(code="mismatched_url", message=message, param="url")
        if not bytes(line.body).startswith(b"{"):
            return BatchError(code="invalid_value", message="`body` must be an object.", param="body")
        if line.custom_id in self._seen:
            message = "This `custom_id` is used by another line before."
            return BatchError(code="duplicate_custom_id", message=message, param="custom_id")
        self._seen.add(line.custom_id)
        return None


def inspect_whole(inspector: Inspector) -> list[BatchError]:
    """The errors of a file after its last line."""
    if not inspector.total:
        return [BatchError(code="empty_file", message="The input file has no lines.")]
    return inspector.errors
