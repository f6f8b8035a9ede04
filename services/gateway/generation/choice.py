"""Sequences that are collected whole, and several that run side by side."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field

from services.common.tasks import end_tasks
from services.gateway.errors import ApiError
from services.gateway.generation.output import Generation, OutputChunk, ScoredToken
from services.gateway.generation.tokens import FinishReason
from services.gateway.tools.calls import CallDelta, join_calls


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
