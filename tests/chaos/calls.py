"""Streamed tool calls against a running stack, by three APIs: what each client received, put together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import anthropic
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


async def _read_message(
    client: anthropic.AsyncAnthropic, index: int, call: StreamedCall, heard: Callable[[], None]
) -> None:
    function = TOOL["function"]
    tools: Any = [{"name": function["name"], "input_schema": function["parameters"]}]
    one: Any = {"type": "any", "disable_parallel_tool_use": True}
    ask: Any = {"messages": [{"role": "user", "content": f"Take notes. # {index}"}], "tools": tools, "tool_choice": one}
    ours = {"seed": index, "temperature": 0.9, "session_id": f"notes-{index}"}
    async with client.messages.stream(model="ryzanstein-tiny", max_tokens=900, **ask, extra_body=ours) as stream:
        async for event in stream:
            if event.type == "input_json":
                call.arguments += event.partial_json
                heard()
        message = await stream.get_final_message()
    (block,) = message.content
    assert block.type == "tool_use"
    call.ids, call.name = [block.id], block.name
    call.finish = "tool_calls" if message.stop_reason == "tool_use" else message.stop_reason


async def _read_response(client: openai.AsyncOpenAI, index: int, call: StreamedCall, heard: Callable[[], None]) -> None:
    tools: Any = [{"type": "function", **TOOL["function"]}]
    async with client.responses.stream(
        model="ryzanstein-tiny",
        input=f"Take notes. # {index}",
        tools=tools,
        tool_choice="required",
        parallel_tool_calls=False,
        max_output_tokens=900,
        temperature=0.9,
        extra_body={"seed": index, "session_id": f"notes-{index}"},
    ) as stream:
        async for event in stream:
            if event.type == "response.function_call_arguments.delta":
                call.arguments += event.delta
                heard()
        response = await stream.get_final_response()
    (item,) = response.output
    assert item.type == "function_call"
    assert item.arguments == call.arguments
    call.ids, call.name = [item.call_id], item.name
    call.finish = "tool_calls" if response.status == "completed" else response.status


async def run_calls(stack: RunningStack, count: int, started: asyncio.Event | None = None) -> list[StreamedCall]:
    """Open `count` streams at once, a third of them by each API, and read them to their ends.

    Sets `started` when all have some arguments.
    """
    calls = [StreamedCall() for _ in range(count)]

    def heard() -> None:
        if started is not None and all(len(call.arguments) > 40 for call in calls):
            started.set()

    async with (
        openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="unused", max_retries=0, timeout=120) as client,
        anthropic.AsyncAnthropic(base_url=stack.url, api_key="unused", max_retries=0, timeout=120) as messages,
        asyncio.TaskGroup() as group,
    ):
        for index, call in enumerate(calls):
            if index % 3 == 0:
                group.create_task(_read_message(messages, index, call, heard))
            else:
                group.create_task((_read if index % 3 == 1 else _read_response)(client, index, call, heard))
    return calls
