"""Answers a generation over HTTP, as one body or as server-sent events."""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import replace
from typing import Generic

from services.gateway.generation.admitted import FALLBACK_HEADER, AdmittedRequest
from services.gateway.generation.choice import Choice
from services.gateway.generation.prepared import Prepared
from services.gateway.generation.request import Caller
from services.gateway.http.exchange import Exchange, UntilDisconnect
from services.gateway.http.heartbeat import Heartbeat
from services.gateway.http.serializer import Body, GeneratingEndpoint, Serializer
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
            async with Heartbeat(exchange, self._heartbeat_s):
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

    serializer: Serializer

    def __init__(self, endpoint: GeneratingEndpoint[Body], exchange: Exchange, *, streamed: bool) -> None:
        self._endpoint = endpoint
        self._exchange = exchange
        self._streamed = streamed

    async def prepare(self, body: Body, model: ServedModel, caller: Caller) -> Prepared:
        """See :class:`Preparer`."""
        answer = await self._endpoint.answer(body, model, caller)
        self.serializer = answer.serializer
        return answer.prepared

    def new_choice(self) -> Choice:
        """See :class:`Serializer`."""
        return self.serializer.new_choice()

    def begin(self, request: AdmittedRequest) -> None:
        """Set the answer's headers, now that its model is known."""
        exchange = self._exchange
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
