"""One WebSocket connection: reads messages, and sends the output of its generations."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
from ryzanstein.v1 import routing_pb2

from services.common.tasks import end_tasks
from services.gateway.api.ignored import Ignored
from services.gateway.asgi import Scope, Send, authorization, header, headers_of
from services.gateway.drain import Drain
from services.gateway.errors import ApiError, internal_error, invalid, shutting_down
from services.gateway.generation.entrance import Entrance
from services.gateway.generation.waiting import EVENTS_HEADER, PATIENCE_HEADER, waiting_json, wants_events
from services.gateway.observation import CLIENT_GONE, ObservedRequest, Observer
from services.gateway.websocket.handshake import SERVICE_RESTART
from services.gateway.websocket.protocol import (
    Auth,
    Cancel,
    ClientMessage,
    Ping,
    Resume,
    SingleSequence,
    Start,
    cancelled,
    failure,
    read,
)
from services.gateway.websocket.replay import ReplayBuffer, ReplayBuffers

log = logging.getLogger(__name__)

_MAX_REPLIES = 256
_BROUGHT = ("ids", "text", "logprobs", "reasoning_content", "tool_calls")  # fields of a token message that may be empty


@dataclass(slots=True)
class _Followed:
    buffer: ReplayBuffer
    position: int  # the number of chunks sent
    model: str  # the last name sent to the client


@dataclass(frozen=True)
class StreamSocket:
    """The resources that the connections of /v1/stream share; see :mod:`services.gateway.websocket.protocol`."""

    entrance: Entrance
    kinds: Mapping[str, SingleSequence[Any]]
    buffers: ReplayBuffers
    observer: Observer
    max_generations: int
    drain: Drain

    def connect(self, scope: Scope, send: Send, request_id: str) -> _Connection:
        """See :data:`Connect`."""
        names = "x-session-id", "traceparent", PATIENCE_HEADER, EVENTS_HEADER
        given = headers_of(scope)
        headers = {name: header(given, name.encode()) for name in names}
        return _Connection(self, send, authorization(given), headers, request_id)


class _Connection:
    def __init__(
        self, socket: StreamSocket, send: Send, authorization: str, headers: Mapping[str, str], request_id: str
    ) -> None:
        self._headers = headers
        self._request_id = request_id  # the connection's id, which its generations share
        self._socket = socket
        self._send = send
        self._authorization = authorization
        self._followed: dict[str, _Followed] = {}
        self._starting: dict[str, asyncio.Task[None]] = {}
        self._replies: list[dict[str, Any]] = []
        self._news = asyncio.Event()
        self._drained = asyncio.Event()
        self._broken = False  # sending has failed
        self._sender = asyncio.create_task(self._send_all())

    async def end(self) -> None:
        """Release a lost connection's generations: those that have begun stay resumable for a while."""
        await end_tasks([self._sender])
        for starting in self._starting.values():
            starting.cancel()
        for followed in self._followed.values():
            self._socket.buffers.release(followed.buffer)

    def wake(self) -> None:
        """Wake the sender, which sends news or ends the connection."""
        self._news.set()

    # --- receiving -------------------------------------------------------------------------------------------------

    async def handle(self, data: bytes | str) -> None:
        """Handle a client's message; errors become messages."""
        name = ""
        try:
            ignored = Ignored(self._socket.entrance.refuse_fields)
            message = read(data, ignored)
            name = getattr(message, "id", "")
            await self._act(message, ignored)
        except ApiError as error:
            self._reply(failure(name, error))
        # Backpressure: stop reading from a client that does not read its replies.
        if len(self._replies) > _MAX_REPLIES and not self._broken:
            self._drained.clear()
            await self._drained.wait()

    async def _act(self, message: ClientMessage, ignored: Ignored) -> None:
        match message:
            case Auth(key=key):
                self._authorization = f"Bearer {key}"
            case Ping():
                self._reply({"type": "pong", **({"ignored": ignored.header} if ignored.names else {})})
            case Start():
                self._start(message, ignored)
            case Resume():
                await self._resume(message)
            case Cancel(id=name):
                if starting := self._starting.get(name):
                    starting.cancel()
                    self._reply(cancelled(name))
                elif name not in self._followed:
                    raise invalid(f"No generation `{name}` is running on this connection.", "id", "unknown_generation")
                else:
                    await self._followed[name].buffer.cancel()

    def _start(self, message: Start, ignored: Ignored) -> None:
        """Start a generation in a separate task, since it may wait for a model and must not delay others."""
        observed = self._socket.observer.begin(
            message.kind, f"stream {message.kind}", self._headers["traceparent"], self._request_id
        )
        try:
            if self._socket.drain.closing:
                raise shutting_down()
            self._check_name(message.id)
        except ApiError as error:
            observed.end(error.status, "")
            raise
        task = self._starting[message.id] = asyncio.create_task(self._begin(message, ignored, observed))
        task.add_done_callback(partial(self._begun, message.id, observed))

    def _begun(self, name: str, observed: ObservedRequest, task: asyncio.Task[None]) -> None:
        del self._starting[name]
        if task.cancelled():  # maybe before its first step
            observed.end(CLIENT_GONE, "")
        self.wake()

    async def _begin(self, message: Start, ignored: Ignored, observed: ObservedRequest) -> None:
        try:
            async with self._socket.drain.limit():
                buffer = await self._buffer(message, ignored, observed)
        except ApiError as error:
            self._refuse(message.id, error, observed)
        except Exception:  # a bug ends only this generation
            log.exception("generation not begun")
            self._refuse(message.id, internal_error(), observed)
        else:
            self._follow(message.id, buffer, 0)

    def _refuse(self, name: str, error: ApiError, observed: ObservedRequest) -> None:
        observed.end(error.status, "")
        self._reply(failure(name, error))

    async def _buffer(self, message: Start, ignored: Ignored, observed: ObservedRequest) -> ReplayBuffer:
        socket = self._socket
        entrance, kind = socket.entrance, socket.kinds[message.kind]
        tenant = await entrance.gate.identify(self._authorization)
        patience = self._headers[PATIENCE_HEADER] if message.patience is None else str(message.patience)
        events = self._headers[EVENTS_HEADER] if message.events is None else ",".join(message.events)
        wanted = wants_events(events)
        async with AsyncExitStack() as held:
            request = await held.enter_async_context(entrance.admit(tenant, patience))
            request.tell(partial(self._say, message.id) if wanted else lambda start: None)
            request.ignored.names.update(ignored.names)
            body = await kind.decode(bytes(message.request), request.ignored)
            await request.start(kind, body, self._headers["x-session-id"], observed.traceparent)
            buffer = ReplayBuffer(request, kind, held.pop_all(), observed, socket.drain)
        socket.buffers.add(buffer)
        return buffer

    async def _resume(self, message: Resume) -> None:
        self._check_name(message.id)
        tenant = await self._socket.entrance.gate.identify(self._authorization)
        buffer = self._socket.buffers.take(message.token, tenant)
        self._follow(message.id, buffer, buffer.position_of(message.first))

    def _check_name(self, name: str) -> None:
        if name in self._followed or name in self._starting:
            raise invalid(f"The generation `{name}` is already running on this connection.", "id", "duplicate_id")
        if len(self._followed.keys() | self._starting.keys()) >= self._socket.max_generations:  # one may be in both
            limit = self._socket.max_generations
            raise invalid(f"At most {limit} generations may run on one connection.", "id", "too_many_generations")

    def _follow(self, name: str, buffer: ReplayBuffer, position: int) -> None:
        self._followed[name] = _Followed(buffer, position, buffer.model)
        buffer.follow(self.wake)
        self._reply(buffer.beginning(name))

    def _say(self, name: str, start: routing_pb2.ModelStart) -> None:
        if not self._broken:
            self._reply({"type": "waiting", "id": name, **waiting_json(start)})

    # --- sending ---------------------------------------------------------------------------------------------------

    def _reply(self, message: dict[str, Any]) -> None:
        self._replies.append(message)
        self._news.set()

    async def _send_all(self) -> None:
        """Send until cancelled. A send waits while the client does not read; output of that time shares one message.

        A closing gateway ends the connection after its last generation.
        """
        try:
            while True:
                await self._news.wait()
                self._news.clear()
                await self._send_news()
                if self._socket.drain.closing and not (self._followed or self._starting or self._replies):
                    await self._send({"type": "websocket.close", "code": SERVICE_RESTART, "reason": "shutting down"})
                    return
        finally:
            self._broken = True
            self._drained.set()

    async def _send_news(self) -> None:
        replies, self._replies = self._replies, []
        for reply in replies:
            await self._write(reply)
        self._drained.set()
        for name, followed in list(self._followed.items()):
            await self._advance(name, followed)

    async def _advance(self, name: str, followed: _Followed) -> None:
        buffer = followed.buffer
        if followed.model != buffer.model:
            followed.model = buffer.model
            await self._write(buffer.beginning(name))
        available, ended = len(buffer.chunks), buffer.ended
        if available > followed.position:
            message = buffer.message(name, followed.position)
            followed.position = available
            if any(message.get(part) for part in _BROUGHT):
                await self._write(message)
        if ended:
            self._followed.pop(name, None)
            await self._write(buffer.ending(name))
            # Keep it resumable: a lost connection may have lost the last message.
            self._socket.buffers.release(buffer)

    async def _write(self, message: dict[str, Any]) -> None:
        await self._send({"type": "websocket.send", "text": msgspec.json.encode(message).decode()})
