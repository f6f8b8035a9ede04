"""Many concurrent streams against a running stack, and what each of them received."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from tests.stack import RunningStack

PROMPTS = [
    "def fibonacci(n):",
    "import os\n",
    "class Stack:\n    def push(self, item):\n",
    "for line in open(path):\n    ",
    "The module ",
    "async def main():\n",
    '    """Return ',
    "if __name__ == ",
]
CONSTRAINED = r"([a-z_]{2,9}( = [0-9]{1,4})?\n)*"  # what every other pair of cases must follow; it never has to end
TIMEOUT_S = 120
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%b"


class BadAnswerError(Exception):
    """Not a stream, or one with an error in it or without its end."""


@dataclass
class Stream:
    """What one client received."""

    text: str = ""
    finish: str | None = None
    error: str = ""


async def read(
    stack: RunningStack, index: int, tokens: int, stream: Stream, heard: Callable[[], None] = lambda: None
) -> Stream:
    """Case `index`, streamed into `stream`: the even ones are greedy, the others sampled with a seed."""
    body = {
        "model": "ryzanstein-tiny",
        "prompt": PROMPTS[index % len(PROMPTS)] + f"  # {index}\n",
        "max_tokens": tokens,
        "temperature": 0.9 if index % 2 else 0.0,
        "seed": index,
        "stream": True,
        "ignore_eos": True,
        "session_id": f"client-{index}",  # so that all workers have some
        **({"guided_regex": CONSTRAINED} if index % 4 > 1 else {}),
    }
    try:
        async with asyncio.timeout(TIMEOUT_S), aclosing(_events(stack.port, body)) as events:
            async for event in events:
                (choice,) = event["choices"]
                stream.text += choice["text"]
                stream.finish = choice["finish_reason"] or stream.finish
                heard()
    except (OSError, BadAnswerError) as error:  # TimeoutError is an OSError
        stream.error = repr(error)
    return stream


async def _events(port: int, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any]]:
    """The events of one answer, read line by line: a full client would need the cores more than what it watches."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        data = json.dumps(body).encode()
        writer.write(HEAD % (len(data), data))
        status = await reader.readline()
        if b" 200 " not in status:
            raise BadAnswerError(status + await reader.read())
        async for line in reader:
            if line.startswith(b"data: [DONE]"):
                return
            if line.startswith(b"data: "):
                event = json.loads(line.removeprefix(b"data: "))
                if "error" in event:
                    raise BadAnswerError(line)
                yield event
        raise BadAnswerError("the stream ended before [DONE]")
    finally:
        writer.close()


async def run_streams(
    stack: RunningStack, count: int, tokens: int, started: asyncio.Event | None = None
) -> list[Stream]:
    """Open `count` streams at once and read them to their ends; set `started` when a quarter have some text."""
    streams = [Stream() for _ in range(count)]

    def heard() -> None:
        if started is not None and sum(bool(stream.text) for stream in streams) >= count // 4:
            started.set()

    async with asyncio.TaskGroup() as group:
        for index, stream in enumerate(streams):
            group.create_task(read(stack, index, tokens, stream, heard))
    return streams


@dataclass
class SteadyLoad:
    """`count` clients, each of which asks its case again until it is told that the load is over."""

    count: int
    tokens: int
    over: bool = False
    answers: list[tuple[int, Stream]] = field(default_factory=list)  # the cases and what came of each asking

    async def run(self, stack: RunningStack) -> None:
        """Ask until `over`, then read what is under way to its end."""
        async with asyncio.TaskGroup() as group:
            for index in range(self.count):
                group.create_task(self._repeat(stack, index))

    def assert_undisturbed(self, reference: list[Stream]) -> None:
        """Every client has had answers, and each is what its case gives without a fault."""
        assert {index for index, _ in self.answers} == set(range(self.count))
        for index, stream in self.answers:
            assert_equal(stream, reference[index], f"an answer to case {index}")

    async def _repeat(self, stack: RunningStack, index: int) -> None:
        while not self.over:
            self.answers.append((index, await read(stack, index, self.tokens, Stream())))


def assert_undisturbed(disturbed: list[Stream], reference: list[Stream]) -> None:
    """Every client received exactly what it would have received without the fault."""
    for index, (got, expected) in enumerate(zip(disturbed, reference, strict=True)):
        assert_equal(got, expected, f"stream {index}")


def assert_equal(got: Stream, expected: Stream, name: str) -> None:
    """One client received it."""
    assert not got.error, f"{name}: {got.error}"
    assert got.finish == expected.finish == "length", f"{name} ended with {got.finish}"
    assert got.text == expected.text, f"{name} differs"
