"""Runs the sequences of one request and writes the answer: whole, or as server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from services.gateway.api.http import Exchange, UntilDisconnect
from services.gateway.errors import ApiError
from services.gateway.generation.output import Chunk, Generation, ScoredToken, Usage
from services.gateway.generation.tokens import Finish
from services.gateway.tools.calls import CallDelta, join_calls


@dataclass(slots=True)
class Choice:
    """A whole sequence."""

    text: str = ""
    ids: list[int] = field(default_factory=list)
    tokens: list[ScoredToken] = field(default_factory=list)
    finish: Finish = Finish.STOP
    reasoning: str = ""
    calls: list[CallDelta] = field(default_factory=list)  # whole ones

    def add(self, chunk: Chunk) -> None:
        """Take a chunk in."""
        self.text += chunk.text
        self.reasoning += chunk.reasoning
        join_calls(self.calls, chunk.calls)
        self.ids += chunk.ids
        self.tokens += chunk.tokens
        if chunk.finish is not None:
            self.finish = chunk.finish


class Dialect(Protocol):
    """How one endpoint writes its answers. Frames are whole server-sent events, one or several."""

    def opening(self, index: int, generation: Generation) -> bytes:
        """Frames before a choice's first chunk; may be empty."""

    def frame(self, index: int, chunk: Chunk, generation: Generation) -> bytes:
        """The frames of a chunk; empty when it has no token.

        In chat and completions a token whose text is not certain yet has a frame, too: clients see the pace, and that
        their stream lives.
        """

    def logprobs(self, index: int, tokens: Sequence[ScoredToken]) -> dict[str, Any] | None:
        """The logprobs of some tokens; None when they were not asked for."""

    async def ending(self, usage: Usage) -> bytes:
        """The last frames of a stream, what marks its end included; raises :class:`ApiError`."""

    def failure(self, error: ApiError) -> bytes:
        """The last frames of a stream that has begun and cannot go on."""

    async def body(self, choices: Sequence[Choice], generations: Sequence[Generation], usage: Usage) -> dict[str, Any]:
        """The whole answer; raises :class:`ApiError`."""


@dataclass(frozen=True, slots=True)
class Job:
    """A request ready to run."""

    generations: list[Generation]
    dialect: Dialect
    stream: bool
    billed: Callable[[Generation], Usage]
    new_choice: Callable[[], Choice] = Choice  # of an answer that is sent whole
    per_prompt: int = 1  # choices that share a prompt: it is counted once
    include_workers: bool = False

    def usage(self) -> Usage:
        """What the request has used so far."""
        total = Usage()
        for index, generation in enumerate(self.generations):
            usage = self.billed(generation)
            total += usage if index % self.per_prompt == 0 else Usage(0, usage.completion_tokens, 0)
        return total

    def reserved_tokens(self) -> int:
        """The most that the request can use."""
        prompts = self.generations[:: self.per_prompt]
        return sum(len(generation.request.prompt_ids) for generation in prompts) + sum(
            generation.request.options.max_tokens for generation in self.generations
        )

    def close(self) -> None:
        """Stop whatever still runs."""
        for generation in self.generations:
            generation.close()


async def run(exchange: Exchange, job: Job) -> None:
    """Run a job to its end or to the client's; raises :class:`ApiError`, also after the answer has begun."""
    try:
        async with UntilDisconnect(exchange):
            if job.stream:
                await _stream(exchange, job)
            else:
                choices = await _collect(job)
                await exchange.send_json(200, await job.dialect.body(choices, job.generations, job.usage()))
    finally:
        job.close()


async def _collect(job: Job) -> list[Choice]:
    choices = [job.new_choice() for _ in job.generations]
    async with aclosing(chunks_of(job.generations)) as chunks:
        async for index, chunk in chunks:
            choices[index].add(chunk)
    return choices


async def _stream(exchange: Exchange, job: Job) -> None:
    exchange.errors = replace(exchange.errors, frames=job.dialect.failure)
    unopened, running, tail = set(range(len(job.generations))), len(job.generations), b""
    async with aclosing(chunks_of(job.generations)) as chunks:
        async for index, chunk in chunks:
            begun = b""
            if index in unopened:
                unopened.discard(index)
                begun = job.dialect.opening(index, job.generations[index])
            frame = begun + job.dialect.frame(index, chunk, job.generations[index])
            if not exchange.status:
                await exchange.start_events()
            exchange.answering = True
            running -= chunk.finish is not None
            if not running:
                tail = frame  # goes out with the end of the stream: one write less
            elif frame:
                await exchange.send_events(frame)
    await exchange.send_events(tail + await job.dialect.ending(job.usage()), last=True)


async def chunks_of(generations: Sequence[Generation]) -> AsyncGenerator[tuple[int, Chunk], None]:
    """Chunks of all sequences as they come, with the index of their sequence."""
    if len(generations) == 1:
        generation = generations[0]
        while True:
            chunk = await generation.next()
            yield 0, chunk
            if chunk.finish is not None:
                return
    else:
        async with aclosing(_merged(generations)) as merged:
            async for item in merged:
                yield item


async def _merged(generations: Sequence[Generation]) -> AsyncGenerator[tuple[int, Chunk], None]:
    ready: asyncio.Queue[tuple[int, Chunk | ApiError]] = asyncio.Queue(maxsize=len(generations))

    async def pump(index: int, generation: Generation) -> None:
        try:
            finished = False
            while not finished:
                chunk = await generation.next()
                finished = chunk.finish is not None
                await ready.put((index, chunk))
        except ApiError as error:
            await ready.put((index, error))

    pumps = [asyncio.create_task(pump(index, generation)) for index, generation in enumerate(generations)]
    try:
        running = len(generations)
        while running:
            index, item = await ready.get()
            if isinstance(item, ApiError):
                raise item
            running -= item.finish is not None
            yield index, item
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
