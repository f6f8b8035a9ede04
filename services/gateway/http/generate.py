"""Answers a generation over HTTP: whole, or as server-sent events."""

from __future__ import annotations

from contextlib import aclosing, closing
from dataclasses import replace
from functools import partial
from typing import Any, Generic, TypeVar

from services.gateway.generation.entrance import AdmittedRequest
from services.gateway.generation.job import FALLBACK_HEADER, GeneratingBody, GenerationTask, Preparer
from services.gateway.http.exchange import Exchange, UntilDisconnect, ignored_tools_header
from services.gateway.http.heartbeat import Heartbeat

Body = TypeVar("Body", bound=GeneratingBody)


class GenerateHandler(Generic[Body]):
    """Serves one generating route."""

    def __init__(self, preparer: Preparer[Body], heartbeat_s: float) -> None:
        self._preparer = preparer
        self._heartbeat_s = heartbeat_s
        self.decode = preparer.decode

    async def answer(self, exchange: Exchange, body: Body, request: AdmittedRequest) -> None:
        """See :class:`Handler`; raises :class:`ApiError`, also after a stream has begun."""
        session = exchange.header(b"x-session-id")
        with closing(GenerationTask(request, self._preparer, body, session, exchange.traceparent)) as task:
            task.on_start = partial(_begin, exchange)
            if body.stream:
                async with Heartbeat(exchange, self._heartbeat_s):
                    await task.start()
                    async with UntilDisconnect(exchange):
                        await _stream(exchange, task)
            else:
                await task.start()
                async with UntilDisconnect(exchange):
                    choices, sequences = await task.collect(), task.sequences
                    answer = await sequences.serializer.body(choices, sequences.generations, sequences.usage())
                    await exchange.send_json(200, answer)


def _begin(exchange: Exchange, task: GenerationTask[Any]) -> None:
    """What the answer says of itself, now that its model is known."""
    exchange.model = task.model.name
    exchange.answer_headers = [*task.request.admission.headers, *ignored_tools_header(task.sequences.ignored_tools)]
    if task.fell_back:
        exchange.answer_headers.append((FALLBACK_HEADER.encode(), task.model.name.encode()))
    if task.body.stream:
        exchange.errors = replace(exchange.errors, frames=task.sequences.serializer.failure)


async def _stream(exchange: Exchange, task: GenerationTask[Any]) -> None:
    running, tail = len(task.sequences.generations), b""
    unopened = set(range(running))
    async with aclosing(task.chunks()) as chunks:
        async for index, chunk in chunks:
            sequences = task.sequences
            generation, begun = sequences.generations[index], b""
            if index in unopened:
                unopened.discard(index)
                begun = sequences.serializer.opening(index, generation)
            frame = begun + sequences.serializer.frame(index, chunk, generation)
            if not exchange.status:
                await exchange.start_events()
            exchange.answering = True
            running -= chunk.finish is not None
            if not running:
                tail = frame  # goes out with the end of the stream: one write less
            elif frame:
                await exchange.send_events(frame)
    await exchange.send_events(tail + await task.sequences.serializer.ending(task.sequences.usage()), last=True)
