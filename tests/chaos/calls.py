"""Streamed tool calls against a running stack: what each client received, put together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import openai

from tests.stack import RunningStack

# Long enough for a fault to meet it, whatever the model writes.
NOTES = {"type": "array", "items": {"type": "string", "maxLength": 30}, "minItems": 24, "maxItems": 24}
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "take_notes",
        "parameters": {
            "type": "object",
            "properties": {"notes": NOTES},
            "required": ["notes"],
            "additionalProperties": False,
        },
    },
}


@dataclass
class StreamedCall:
    """One streamed call."""

    ids: list[str] = field(default_factory=list)
    name: str = ""
    arguments: str = ""
    finish: str | None = None


async def _read(client: openai.AsyncOpenAI, index: int, call: StreamedCall, heard: Callable[[], None]) -> None:
    stream = await client.chat.completions.create(
        model="ryzanstein-tiny",
        messages=[{"role": "user", "content": f"Take notes. # {index}"}],
        tools=[TOOL],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=900,
        temperature=0.9,
        seed=index,
        stream=True,
        extra_body={"session_id": f"notes-{index}"},  # so that all workers have some
    )
    async for chunk in stream:
        (choice,) = chunk.choices
        call.finish = choice.finish_reason or call.finish
        for piece in choice.delta.tool_calls or []:
            assert piece.index == 0
            assert piece.function
            call.ids += [piece.id] if piece.id else []
            call.name += piece.function.name or ""
            call.arguments += piece.function.arguments or ""
            heard()


async def run_calls(stack: RunningStack, count: int, started: asyncio.Event | None = None) -> list[StreamedCall]:
    """Open `count` streams at once and read them to their ends.

    Sets `started` when all have some arguments.
    """
    calls = [StreamedCall() for _ in range(count)]

    def heard() -> None:
        if started is not None and all(len(call.arguments) > 40 for call in calls):
            started.set()

    async with (
        openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="unused", max_retries=0, timeout=120) as client,
        asyncio.TaskGroup() as group,
    ):
        for index, call in enumerate(calls):
            group.create_task(_read(client, index, call, heard))
    return calls
