"""What an endpoint makes of a body: the sequences to run, and how their answer is written."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol

from services.common.tasks import end_tasks
from services.gateway.errors import ApiError
from services.gateway.generation.output import Generation, OutputChunk, ScoredToken
from services.gateway.generation.tokens import FinishReason
from services.gateway.tools.calls import CallDelta, join_calls
from services.gateway.usage import Usage


@dataclass(slots=True)
class Choice:
    """A whole sequence."""

    text: str = ""
    ids: list[int] = field(default_factory=list)
    tokens: list[ScoredToken] = field(default_factory=list)
    finish: FinishReason = FinishReason.STOP
    reasoning: str = ""
    calls: list[CallDelta] = field(default_factory=list)  # whole ones

    def add(self, chunk: OutputChunk) -> None:
        """Take a chunk in."""
        self.text += chunk.text
        self.reasoning += chunk.reasoning
        join_calls(self.calls, chunk.calls)
        self.ids += chunk.ids
        self.tokens += chunk.tokens
        if chunk.finish is not None:
            self.finish = chunk.finish


class Serializer(Protocol):
    """How one endpoint writes its answers. Frames are whole server-sent events, one or several."""

    def opening(self, index: int, generation: Generation) -> bytes:
        """Frames before a choice's first chunk; may be empty."""

    def frame(self, index: int, chunk: OutputChunk, generation: Generation) -> bytes:
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
class Sequences:
    """All sequences of a request; none runs before its first chunk is asked for."""

    generations: list[Generation]
    serializer: Serializer
    stream: bool
    billed: Callable[[Generation], Usage]
    new_choice: Callable[[], Choice] = Choice  # of an answer that is sent whole
    per_prompt: int = 1  # choices that share a prompt: it is counted once
    include_workers: bool = False
    ignored_tools: tuple[str, ...] = ()  # hosted tools that the body offers, which there are none of here

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

    async def collect(self) -> list[Choice]:
        """Run all of them; raises :class:`ApiError`."""
        choices = [self.new_choice() for _ in self.generations]
        if len(choices) == 1:
            generation, choice = self.generations[0], choices[0]
            finished = False
            while not finished:
                chunk = await generation.next()
                choice.add(chunk)
                finished = chunk.finish is not None
        else:
            async with aclosing(merged(self.generations)) as chunks:
                async for index, chunk in chunks:
                    choices[index].add(chunk)
        return choices

    def close(self) -> None:
        """Stop whatever still runs."""
        for generation in self.generations:
            generation.close()


async def merged(generations: Sequence[Generation]) -> AsyncGenerator[tuple[int, OutputChunk], None]:
    """Chunks of several sequences as they come, with the index of their sequence; raises :class:`ApiError`."""
    ready: asyncio.Queue[tuple[int, OutputChunk | ApiError]] = asyncio.Queue(maxsize=len(generations))

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
        await end_tasks(pumps)
