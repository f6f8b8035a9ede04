"""One HTTP exchange on bare ASGI: a bounded body, JSON and SSE answers, and disconnections."""

from __future__ import annotations

import asyncio
import contextlib
from codecs import BOM_UTF8
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from http import HTTPStatus
from types import TracebackType
from typing import Any

import msgspec

from services.common.logs import request_id_var
from services.gateway.api.ignored import IGNORED_HEADER, Ignored
from services.gateway.asgi import JSON, ASGIMessage, Headers, Receive, Scope, Send, authorization, header, headers_of
from services.gateway.errors import ApiError, invalid, too_large
from services.gateway.http.encoding import inflate
from services.gateway.observation import request_id_of

DONE = b"data: [DONE]\n\n"  # the last event of OpenAI's streams
_DISCARD_S = 1.0
_AT_ONCE_S = 0.1


def _error_frames(error: ApiError) -> bytes:
    return b"data: " + msgspec.json.encode(error.body()) + b"\n\n" + DONE


@dataclass(frozen=True, slots=True)
class ErrorShape:
    """The form of errors in an API dialect."""

    body: Callable[[ApiError], dict[str, Any]] = ApiError.body  # a whole answer
    frames: Callable[[ApiError], bytes] = _error_frames  # the end of a stream


OPENAI_ERRORS = ErrorShape()


@dataclass(frozen=True, slots=True)
class ApiDialect:
    """The properties that all answers of a dialect share."""

    errors: ErrorShape = OPENAI_ERRORS
    # An SSE comment, which clients ignore. A blank line behind it would be an empty event to some of them.
    heartbeat: bytes = b": waiting\n"
    id_header: bytes = b""  # a second header with the request's id, besides x-request-id


OPENAI_DIALECT = ApiDialect()
_SSE: Headers = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """Limits of a request's body."""

    max_bytes: int
    timeout_s: float


class Exchange:
    """A request and its answer."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, dialect: ApiDialect = OPENAI_DIALECT) -> None:
        self.scope = scope
        self.headers = headers_of(scope)
        self.receive = receive
        self._send = send
        self._received = False  # the whole body has arrived
        self.status = 0  # set when the answer starts
        self.failure = 0  # the status of an error after that
        self.streaming = False  # a stream of server-sent events has started
        self.answering = False  # an event has been sent, not only comments
        self.sent_at = 0.0  # event-loop time of the last event or comment
        self.complete = False  # the last byte has been handed to the server
        self.response_headers: Headers = []
        self.answer_headers: Headers = []  # set by the attempt that answers
        self.ignored = Ignored()  # the part of the body that is left out
        self.dialect = dialect
        self.errors = dialect.errors
        self.model = ""  # for metrics; empty until known
        self.traceparent = ""

    async def send(self, message: ASGIMessage) -> None:
        """Send an ASGI message; a head gets the headers that all answers to this request have."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [*message.get("headers", ()), *self.response_headers]
        await self._send(message)

    def identify(self) -> str:
        """Set the request's id, for the answer's headers and the log."""
        request_id = request_id_of(self.header(b"x-request-id"))
        request_id_var.set(request_id)
        for name in filter(None, (b"x-request-id", self.dialect.id_header)):
            self.response_headers.append((name, request_id.encode("latin-1")))
        return request_id

    def header(self, name: bytes) -> str:
        """A request header (name in lower case), or the empty string."""
        return header(self.headers, name)

    @property
    def authorization(self) -> str:
        """See :func:`authorization`."""
        return authorization(self.headers)

    async def body(self, limits: BodyLimits) -> bytes:
        """The whole body; raises :class:`ApiError` 413, 408 or 400."""
        self._check_type()
        try:
            async with asyncio.timeout(limits.timeout_s):
                data = b"".join([piece async for piece in self.pieces(limits.max_bytes)])
        except TimeoutError as error:
            message = f"The request's body did not arrive within {limits.timeout_s:g} s."
            raise ApiError(408, message, "invalid_request_error", code="body_timeout") from error
        self._received = True
        encoding = self.header(b"content-encoding").strip().lower()
        plain = data if encoding in ("", "identity") else await inflate(data, encoding, limits.max_bytes)
        return plain.removeprefix(BOM_UTF8)

    def _check_type(self) -> None:
        """Refuse content types that browsers send to other sites without a preflight; raises :class:`ApiError` 415."""
        media = self.header(b"content-type").partition(";")[0].strip().lower()
        if media and media != "application/json" and not media.endswith("+json"):
            message = f"The body must be application/json, not {media} (header Content-Type)."
            raise ApiError(415, message, "invalid_request_error", code="unsupported_media_type")

    async def pieces(self, max_bytes: int) -> AsyncIterator[bytes]:
        """The body as it arrives; raises :class:`ApiError` 413 or 400."""
        declared, left, more = self.header(b"content-length"), max_bytes, True
        if declared.isdigit() and int(declared) > max_bytes:
            raise too_large(max_bytes)
        while more:
            message = await self.receive()
            if message["type"] == "http.disconnect":
                raise invalid("The client went away before its request was complete.")
            piece, more = message.get("body", b""), message.get("more_body", False)
            left -= len(piece)
            if left < 0:
                raise too_large(max_bytes)
            yield piece

    async def send_json(self, status: int, value: object, headers: Headers | None = None) -> None:
        """Answer with JSON."""
        await self.send_bytes(status, msgspec.json.encode(value), [JSON, *(headers or ())])

    async def send_bytes(self, status: int, body: bytes, headers: Headers) -> None:
        """Answer with bytes."""
        length = (b"content-length", str(len(body)).encode())
        await self._start(status, [*headers, length])
        self.complete = True
        await self._send({"type": "http.response.body", "body": body})

    async def send_error(self, error: ApiError) -> None:
        """Answer with an error in the dialect's shape."""
        headers = [(name.encode(), value.encode()) for name, value in error.headers]
        if error.retry_after_s is not None:
            headers.append((b"retry-after", str(max(1, round(error.retry_after_s))).encode()))
        if error.status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
            await self._discard_body()
        if error.status in (408, 413):  # the body was not read to its end
            headers.append((b"connection", b"close"))
        await self.send_json(error.status, self.errors.body(error), headers)

    async def _discard_body(self) -> None:
        """Read on for a moment: closing while the client sends would reset the connection and lose the answer."""
        if self._received or self.header(b"expect"):
            return  # the body is complete, or the client waits for `100 Continue`
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_DISCARD_S):
                while (await self.receive()).get("more_body", False):
                    pass

    async def fail(self, error: ApiError) -> None:
        """End with an error: as the answer, or as the last event of a stream.

        Raises the error when neither can be sent any more.
        """
        if not self.status:
            await self.send_error(error)
        elif self.streaming and not self.complete:
            self.failure = error.status
            await self.send_events(self.errors.frames(error), last=True)
        else:
            raise error

    async def start_events(self) -> None:
        """Start a stream of server-sent events."""
        self.streaming = True
        await self._start(200, _SSE)

    async def send_events(self, frames: bytes, *, last: bool = False) -> None:
        """Send events; `last` ends the stream."""
        self.complete = last
        self.sent_at = asyncio.get_running_loop().time()
        await self._send({"type": "http.response.body", "body": frames, "more_body": not last})

    async def _start(self, status: int, headers: Headers) -> None:
        ignored = [(IGNORED_HEADER.encode(), self.ignored.header.encode())] if self.ignored.names else []
        headers = [*headers, *self.answer_headers, *ignored]
        await self.send({"type": "http.response.start", "status": status, "headers": headers})


class UntilDisconnect:
    """Cancels the enclosed block, without an error, when the client disconnects.

    The watch begins after a delay: quick answers need none, and a timer costs less than a task.
    """

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._loop = asyncio.get_running_loop()
        self._watcher: asyncio.Task[None] | None = None
        self.gone = False

    async def __aenter__(self) -> UntilDisconnect:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._timer = self._loop.call_later(_AT_ONCE_S, self._begin)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self._timer.cancel()
        if self._watcher is not None:
            self._watcher.cancel()
            self._watcher = None  # break the reference cycle, which would keep the request until a garbage collection
        if self.gone and kind is not None and issubclass(kind, asyncio.CancelledError):
            return self._task.uncancel() == 0
        return False

    def _begin(self) -> None:
        self._watcher = self._loop.create_task(self._watch())

    async def _watch(self) -> None:
        while (await self._exchange.receive())["type"] != "http.disconnect":
            pass
        if not self._exchange.complete:  # servers also send "disconnect" after a complete answer
            self.gone = True
            self._task.cancel()
