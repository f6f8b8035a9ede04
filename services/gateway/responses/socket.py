"""The WebSocket of /v1/responses, as OpenAI's clients speak it: many responses over one connection.

A client sends `{"type": "response.create", ...}` with the fields of the body of POST /v1/responses, and gets the events
of the stream as JSON messages. Responses of one `stream_id` are made one after the other, and their events have it;
those of several are made at the same time. The connection remembers its last turns, so that `previous_response_id` goes
on from them without Redis, and also where `store` is false. It forgets the turn that a response of its lane failed to
go on from. After a reconnect, to whichever gateway, it goes on from kept ones. `response.steer` adds to a response that
is being made (`steering.py`). The first event of a response has `ignored` if a part of the request was left out, with
the value of REST's header `x-ryzanstein-ignored`.
An error is `{"type": "error", "status": ..., "error": {...}}` and ends its response, not the connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from services.common.tasks import end_tasks
from services.gateway.api.ignored import IGNORED_HEADER
from services.gateway.asgi import ASGIApp, ASGIMessage, Headers, Scope, Send, header, headers_of
from services.gateway.drain import Drain
from services.gateway.errors import ApiError, invalid
from services.gateway.http.responses.origin import OPEN_RESPONSES_HEADER, RequestOrigin, from_origin
from services.gateway.inside import EventReader, post
from services.gateway.responses.recent import LaneTurns, RecentTurns
from services.gateway.responses.steering import (
    STEER,
    Fields,
    QueuedSteers,
    Steer,
    SteerBody,
    SteerError,
    is_steerable,
    previous_of,
    required_outputs,
    successor_of,
    with_steers,
)
from services.gateway.websocket.handshake import SERVICE_RESTART

_PASSED_ON = (
    *("authorization", "x-api-key", "x-session-id", "traceparent", "x-ryzanstein-patience"),
    OPEN_RESPONSES_HEADER,
)
_MAX_WAITING = 64  # requests of a connection that have not ended
_MAX_LANE = 256  # characters of a `stream_id`
_CREATED = b'{"type":"response.created"'
_FAILED = b'{"type":"response.failed"'
_LAST = (b'{"type":"response.completed"', b'{"type":"response.incomplete"', _FAILED)
_NO_SUCCESSOR = SteerError("successor_creation_failed", "The response that would take up this input was not made.")
_NOT_HERE = {
    "background": "`background` is for POST /v1/responses; here a response ends with its connection.",
}


class _Kind(msgspec.Struct):
    type: str
    stream_id: str | None = None


@dataclass(frozen=True)
class ResponsesSocket:
    """The resources that the connections of /v1/responses share."""

    routes: ASGIApp  # POST /v1/responses
    drain: Drain
    memory_bytes: int

    def connect(self, scope: Scope, send: Send, request_id: str) -> _Connection:
        """See :data:`Connect`."""
        return _Connection(self, scope, send, request_id)


class _Connection:
    def __init__(self, socket: ResponsesSocket, scope: Scope, send: Send, request_id: str) -> None:
        self._socket = socket
        self._send = send
        given = headers_of(scope)
        passed_on = [(name.encode(), header(given, name.encode()).encode("latin-1")) for name in _PASSED_ON]
        self._headers: Headers = [(b"x-request-id", request_id.encode("latin-1"))]
        self._headers += [(name, value) for name, value in passed_on if value]
        self._recent = RecentTurns(socket.memory_bytes)
        self._lanes: dict[str | None, asyncio.Task[None]] = {}
        self._running: dict[str | None, _Events] = {}
        self._steers = QueuedSteers()
        self._waiting = 0
        self._sending = asyncio.Lock()
        self._closing: asyncio.Task[None] | None = None

    async def end(self) -> None:
        """Abandon what is not complete."""
        await end_tasks([*self._lanes.values(), *([self._closing] if self._closing else [])])

    def wake(self) -> None:
        """See :class:`SocketConnection`."""
        if self._socket.drain.closing and not self._waiting and self._closing is None:
            close = {"type": "websocket.close", "code": SERVICE_RESTART, "reason": "shutting down"}
            self._closing = asyncio.create_task(self._put(close))

    async def handle(self, data: bytes | str) -> None:
        """Begin what a message asks for, behind its lane's earlier responses; errors become messages."""
        lane: str | None = None
        try:
            kind = _read(data)
            if kind.type == STEER:
                await self._steer(data)
                return
            lane = kind.stream_id
            fields = _fields_of(data)
            if self._waiting >= _MAX_WAITING:
                message = f"At most {_MAX_WAITING} responses may wait on one connection."
                raise ApiError(429, message, "requests", code="too_many_responses", retry_after_s=1)
        except ApiError as error:
            await self._fail(lane, error.status, error.body()["error"])
            return
        self._waiting += 1
        self._lanes[lane] = asyncio.create_task(self._answer(lane, fields, self._lanes.get(lane)))

    async def _answer(self, lane: str | None, fields: Fields, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await asyncio.wait([before])
        try:
            following: Fields | None = fields
            while following is not None:
                following = await self._make(lane, following)
        finally:
            self._waiting -= 1
            if self._lanes.get(lane) is asyncio.current_task():
                del self._lanes[lane]
            self.wake()

    async def _make(self, lane: str | None, fields: Fields) -> Fields | None:
        """Make a response; returns the fields of its successor if it was steered, and waits for no output of a call."""
        taken = self._steers.take(previous_of(fields), lane)
        answer = self._running[lane] = _Events(self, lane, steerable=is_steerable(fields))
        body = msgspec.json.encode(with_steers(fields, taken))
        more = from_origin(RequestOrigin(recent=LaneTurns(self._recent, lane)))
        # A task of its own has its own context, which holds the request's log fields and trace.
        asking = asyncio.create_task(post(self._socket.routes, "/v1/responses", self._headers, body, answer.send, more))
        try:
            await asyncio.wait([asking])
            asking.result()
        finally:
            del self._running[lane]
            await end_tasks([asking])
        if answer.failed:
            self._recent.forget(previous_of(fields), lane)
        if not answer.response_id:
            await answer.add_all(steer.failed(_NO_SUCCESSOR) for steer in taken)
        return await self._succeeded(lane, fields, answer)

    async def _succeeded(self, lane: str | None, fields: Fields, answer: _Events) -> Fields | None:
        """The fields of the successor of an ended response; its steers wait or fail where there is none."""
        steers = self._steers.of(answer.response_id, lane)
        if not steers:
            return None
        output = answer.output()
        if output is None:
            failed = self._steers.take(answer.response_id, lane)
            await answer.add_all(steer.failed(_NO_SUCCESSOR) for steer in failed)
            return None
        if required := required_outputs(output):
            await answer.add_all(steer.pending(required) for steer in steers)
            return None
        return successor_of(fields, answer.response_id)

    async def _steer(self, data: bytes | str) -> None:
        """Queue what a client adds to a running response, or say why not; raises :class:`ApiError` (400)."""
        body = _steer_of(data)
        target = next((each for each in self._running.values() if each.response_id == body.previous_response_id), None)
        try:
            if target is None or target.ended:
                raise self._not_running(body.previous_response_id, known=target is not None)
            if not target.steerable:
                message = "A response with `conversation` or `context_management` cannot be steered."
                raise SteerError("steering_not_supported", message)
            event = self._steers.add(data, body, target.lane).accepted()
        except SteerError as error:
            event = Steer(body).failed(error)
        await (target or _Events(self, None)).add_all([event])

    def _not_running(self, response_id: str, *, known: bool) -> SteerError:
        if known or self._recent.get(response_id):
            return SteerError("response_already_completed", "The response is complete: go on with `response.create`.")
        return SteerError("response_not_found", "No response of this connection has this id.")

    async def put_event(self, lane: str | None, event: bytes) -> None:
        """Send an event; waits while the client does not read."""
        if lane is not None:
            event = event[:-1] + b',"stream_id":' + msgspec.json.encode(lane) + b"}"
        await self._put({"type": "websocket.send", "text": event.decode()})

    async def _fail(self, lane: str | None, status: int, error: Mapping[str, Any]) -> None:
        await self.put_event(lane, msgspec.json.encode({"type": "error", "status": status, "error": error}))

    async def fail_with(self, lane: str | None, status: int, body: bytes) -> None:
        """Send the error that a request was answered with."""
        await self._fail(lane, status, msgspec.json.decode(body)["error"])

    async def _put(self, message: ASGIMessage) -> None:
        async with self._sending:
            await self._send(message)


class _Events:
    """Passes a stream's events on, and an error that comes instead."""

    def __init__(self, connection: _Connection, lane: str | None, *, steerable: bool = False) -> None:
        self.lane, self.steerable = lane, steerable
        self.response_id = ""  # until the response is created
        self._last = b""  # the event that ends the response
        self._number = 0  # number of the next event
        self._added = 0  # events that are not the stream's
        self._connection = connection
        self._reader = EventReader()
        self._status = 0
        self._ignored = ""  # for the first event
        self._body = b""

    async def send(self, message: ASGIMessage) -> None:
        """ASGI."""
        if message["type"] == "http.response.start":
            self._status = message["status"]
            self._ignored = dict(message["headers"]).get(IGNORED_HEADER.encode(), b"").decode()
            return
        data = message.get("body", b"")
        if self._status == 200:
            for event in self._reader.read(data):
                await self._pass(event)
            return
        self._body += data
        if not message.get("more_body", False):
            await self._connection.fail_with(self.lane, self._status, self._body)

    @property
    def ended(self) -> bool:
        """Whether the response's last event has come."""
        return bool(self._last)

    @property
    def failed(self) -> bool:
        """Whether there is no response, or a failed one."""
        return not self._last or self._last.startswith(_FAILED)

    def output(self) -> list[dict[str, Any]] | None:
        """The items of an ended response; None if it failed."""
        if self.failed:
            return None
        items: list[dict[str, Any]] = msgspec.json.decode(self._last)["response"]["output"]
        return items

    async def add_all(self, events: Iterable[dict[str, Any]]) -> None:
        """Send events that are not the stream's."""
        for event in events:
            number, self._number, self._added = self._number, self._number + 1, self._added + 1
            await self._connection.put_event(self.lane, msgspec.json.encode({**event, "sequence_number": number}))

    async def _pass(self, event: bytes) -> None:
        if event.startswith(_CREATED):
            self.response_id = msgspec.json.decode(event)["response"]["id"]
        elif event.startswith(_LAST):
            self._last = event
        passed = self._named(_as_socket_error(event))
        if self._added:
            passed = _numbered(passed, self._number)
        self._number += 1
        await self._connection.put_event(self.lane, passed)

    def _named(self, event: bytes) -> bytes:
        """The event; the first one with the names of what is left out."""
        if self._ignored:
            event = event[:-1] + b',"ignored":' + msgspec.json.encode(self._ignored) + b"}"
            self._ignored = ""
        return event


def _read(data: bytes | str) -> _Kind:
    """The kind of the message; raises :class:`ApiError` (400)."""
    try:
        kind = msgspec.json.decode(data, type=_Kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        message = f"A message is a JSON object with a `type`, such as `response.create`: {error}."
        raise invalid(message, "type", "invalid_json") from error
    if kind.type not in ("response.create", STEER):
        message = f"`type` may be `response.create` or `{STEER}`; `{kind.type[:100]}` is not supported."
        raise invalid(message, "type", "unsupported_value")
    if kind.stream_id is not None and not 0 < len(kind.stream_id) <= _MAX_LANE:
        raise invalid(f"`stream_id` must have 1 to {_MAX_LANE} characters.", "stream_id")
    return kind


def _steer_of(data: bytes | str) -> SteerBody:
    """The fields of a steer; raises :class:`ApiError` (400)."""
    try:
        return msgspec.json.decode(data, type=SteerBody)
    except msgspec.ValidationError as error:
        named = next(
            (name for name in SteerBody.__struct_fields__ if f"`{name}`" in str(error)), "previous_response_id"
        )
        raise invalid(f"A `{STEER}` has `previous_response_id` and `input`: {error}.", named) from error


def _fields_of(data: bytes | str) -> Fields:
    """The body of POST /v1/responses; raises :class:`ApiError` (400)."""
    fields = msgspec.json.decode(data, type=Fields)
    for name, message in _NOT_HERE.items():
        if name in fields and bytes(fields[name]) not in (b"false", b"null"):
            raise invalid(message, name, "unsupported_field")
    own = {name: value for name, value in fields.items() if name not in ("type", "stream_id", "stream", *_NOT_HERE)}
    return {**own, "stream": msgspec.Raw(b"true")}


def _numbered(event: bytes, number: int) -> bytes:
    """The event with another `sequence_number`."""
    fields = msgspec.json.decode(event, type=Fields)
    return msgspec.json.encode({**fields, "sequence_number": msgspec.Raw(str(number).encode())})


def _as_socket_error(event: bytes) -> bytes:
    """An error that a stream has before its first event, in the shape of this API; other events as they are."""
    if not event.startswith(b'{"type":"error"'):
        return event
    given = msgspec.json.decode(event)
    flat = {"type": given.get("code") or "error", **{name: given.get(name) for name in ("code", "message", "param")}}
    return msgspec.json.encode({"type": "error", "status": given["status"], "error": given.get("error", flat)})
