"""Answers a generation over HTTP, as one body or as server-sent events."""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Generic

from services.gateway.generation.admitted import FALLBACK_HEADER, AdmittedRequest
from services.gateway.generation.choice import Choice
from services.gateway.generation.prepared import Prepared
from services.gateway.generation.request import Caller
from services.gateway.http.exchange import Exchange, UntilDisconnect
from services.gateway.http.heartbeat import Heartbeat
from services.gateway.http.serializer import Answer, Body, GeneratingEndpoint, Serializer
from services.gateway.text.codec import ServedModel


class GenerateHandler(Generic[Body]):
    """Serves one generating route."""

    def __init__(self, endpoint: GeneratingEndpoint[Body], heartbeat_s: float) -> None:
        self._endpoint = endpoint
        self._heartbeat_s = heartbeat_s
        self.decode = endpoint.decode

    async def answer(self, exchange: Exchange, body: Body, request: AdmittedRequest) -> None:
        """See :class:`Handler`; raises :class:`ApiError`, also after a stream has begun."""
        session = exchange.header(b"x-session-id")
        writing = _Writing(self._endpoint, exchange, streamed=bool(body.stream))
        request.on_start = writing.begin
        if body.stream:
            async with Heartbeat(exchange, self._heartbeat_s, partial(writing.idle_event, request)):
                await request.start(writing, body, session, exchange.traceparent)
                async with UntilDisconnect(exchange):
                    await _stream(exchange, request, writing)
        else:
            await request.start(writing, body, session, exchange.traceparent)
            async with UntilDisconnect(exchange):
                choices, prepared = await request.collect(writing.new_choice), request.prepared
                answer = await writing.serializer.body(choices, prepared.generations, prepared.usage())
                await exchange.send_json(200, answer)


class _Writing(Generic[Body]):
    """One answer in progress; a fallback model brings another serializer."""

    _answer: Answer

    def __init__(self, endpoint: GeneratingEndpoint[Body], exchange: Exchange, *, streamed: bool) -> None:
        self._endpoint = endpoint
        self._exchange = exchange
        self._streamed = streamed
        self._begun = False  # on the model of `_answer`

    async def prepare(self, body: Body, model: ServedModel, caller: Caller) -> Prepared:
        """See :class:`Preparer`."""
        self._begun = False
        self._answer = await self._endpoint.answer(body, model, caller)
        return self._answer.prepared

    @property
    def serializer(self) -> Serializer:
        """See :class:`Answer`."""
        return self._answer.serializer

    def idle_event(self, request: AdmittedRequest) -> bytes:
        """See :class:`Answer`; from then on, no other model can answer. Empty if there is none now."""
        if not self._begun or self._answer.idle_event is None:
            return b""
        request.answering = self._exchange.answering = True
        return self._answer.idle_event(request.prepared.generations[0])

    def new_choice(self) -> Choice:
        """See :class:`Serializer`."""
        return self.serializer.new_choice()

    def begin(self, request: AdmittedRequest) -> None:
        """Set the answer's headers, now that its model is known."""
        exchange, self._begun = self._exchange, True
        exchange.model = request.model.name
        exchange.answer_headers = list(request.admission.headers)
        if request.fell_back:
            exchange.answer_headers.append((FALLBACK_HEADER.encode(), request.model.name.encode()))
        if self._streamed:
            exchange.errors = replace(exchange.errors, frames=self.serializer.failure)


async def _stream(exchange: Exchange, request: AdmittedRequest, writing: _Writing[Body]) -> None:
    running, tail = len(request.prepared.generations), b""
    unopened = set(range(running))
    async with aclosing(request.chunks()) as chunks:
        async for index, chunk in chunks:
            serializer = writing.serializer
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
    await exchange.send_events(tail + await writing.serializer.ending(request.prepared.usage()), last=True)
