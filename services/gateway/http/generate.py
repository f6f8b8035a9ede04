"""Answers a generation over HTTP, as one body or as server-sent events."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from contextlib import aclosing, nullcontext
from dataclasses import replace
from functools import partial
from typing import Generic

from services.gateway.api.ignored import Ignored
from services.gateway.generation.admitted import AdmittedRequest
from services.gateway.generation.models import HandedOutError
from services.gateway.generation.waiting import EVENTS_HEADER, wants_events
from services.gateway.http.exchange import Exchange, UntilDisconnect
from services.gateway.http.heartbeat import Heartbeat
from services.gateway.http.outside import OutsideAnswer
from services.gateway.http.serializer import Body, Serializer

_EVENTS = EVENTS_HEADER.encode()


class GenerateHandler(Generic[Body]):
    """Serves one generating route; each request has a serializer of its own."""

    def __init__(
        self,
        decode: Callable[[bytes, Ignored], Coroutine[None, None, Body]],
        new_serializer: Callable[[Exchange], Serializer[Body]],
        heartbeat_s: float,
        outside: OutsideAnswer | None = None,
    ) -> None:
        """`outside`: answers by external models; None: only those of this installation answer."""
        self.decode = decode
        self._outside = outside
        self._new_serializer = new_serializer
        self._heartbeat_s = heartbeat_s

    async def answer(self, exchange: Exchange, body: Body, request: AdmittedRequest) -> None:
        """See :class:`Handler`; raises :class:`ApiError`, also after a stream has begun."""
        request.may_leave = self._outside is not None
        try:
            await self._answer(exchange, body, request)
        except HandedOutError as handed:
            assert self._outside is not None
            beats = Heartbeat(exchange, self._heartbeat_s, bytes) if body.stream else nullcontext()
            async with beats, UntilDisconnect(exchange):
                await self._outside.answer(exchange, body, request, handed)

    async def _answer(self, exchange: Exchange, body: Body, request: AdmittedRequest) -> None:
        session = exchange.header(b"x-session-id")
        serializer, streamed = self._new_serializer(exchange), bool(body.stream)
        request.on_start = partial(_begin, exchange, serializer, streamed)
        async with UntilDisconnect(exchange):
            if streamed:
                as_event = wants_events(exchange.header(_EVENTS))
                idle = partial(_idle_event, exchange, serializer, request)
                async with Heartbeat(exchange, self._heartbeat_s, idle) as heartbeat:
                    request.tell(partial(heartbeat.say, as_event=as_event))
                    await request.start(serializer, body, session, exchange.traceparent)
                    await _stream(exchange, request, serializer)
            else:
                await request.start(serializer, body, session, exchange.traceparent)
                choices, generations = await request.collect(serializer.new_choice), request.prepared.generations
                if request.used.cost is not None:  # a header has it
                    exchange.answer_headers = request.headers()
                answer = await serializer.body(choices, generations, request.used)
                await exchange.send_json(200, answer)


def _begin(exchange: Exchange, serializer: Serializer[Body], streamed: bool, request: AdmittedRequest) -> None:
    """Set the answer's headers, now that its model is known."""
    exchange.model = request.model.name
    exchange.answer_headers = request.headers()
    if streamed:
        exchange.errors = replace(exchange.errors, frames=serializer.failure)


def _idle_event(exchange: Exchange, serializer: Serializer[Body], request: AdmittedRequest) -> bytes:
    """See :class:`Serializer`; after an event, no other model can answer. Empty while none is ready to."""
    event = b"" if request.starting else serializer.idle_event(request.prepared.generations[0])
    if event:
        request.answering = exchange.answering = True
    return event


async def _stream(exchange: Exchange, request: AdmittedRequest, serializer: Serializer[Body]) -> None:
    running, tail = len(request.prepared.generations), b""
    unopened = set(range(running))
    async with aclosing(request.chunks()) as chunks:
        async for index, chunk in chunks:
            generation, begun = request.prepared.generations[index], b""
            if index in unopened:
                unopened.discard(index)
                begun = serializer.opening(index, generation)
            frame = begun + serializer.frame(index, chunk, generation)
            if not exchange.status:
                await exchange.start_events()
            exchange.answering = True
            running -= chunk.finish is not None
            if not running:
                tail = frame  # sent together with the end of the stream, which saves a write
            elif frame:
                await exchange.send_events(frame)
    await exchange.send_events(tail + await serializer.ending(request.used), last=True)
