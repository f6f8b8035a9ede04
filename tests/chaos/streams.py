"""Many concurrent streams against a running stack, and what each of them received."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import openai

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


@dataclass
class Stream:
    """What one client received."""

    text: str = ""
    finish: str | None = None
    error: str = ""


def open_client(stack: RunningStack) -> openai.AsyncOpenAI:
    """A client that never tries again."""
    return openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="unused", max_retries=0, timeout=120)


async def read(
    client: openai.AsyncOpenAI, index: int, tokens: int, stream: Stream, heard: Callable[[], None] = lambda: None
) -> Stream:
    """Case `index`, streamed into `stream`: the even ones are greedy, the others sampled with a seed."""
    try:
        events = await client.completions.create(
            model="ryzanstein-tiny",
            prompt=PROMPTS[index % len(PROMPTS)] + f"  # {index}\n",
            max_tokens=tokens,
            temperature=0.9 if index % 2 else 0.0,
            seed=index,
            stream=True,
            extra_body={
                "ignore_eos": True,
                "session_id": f"client-{index}",  # so that all workers have some
                **({"guided_regex": CONSTRAINED} if index % 4 > 1 else {}),
            },
        )
        async for event in events:
            stream.text += event.choices[0].text
            stream.finish = event.choices[0].finish_reason or stream.finish
            heard()
    except openai.APIError as error:
        stream.error = repr(error)
    return stream


async def run_streams(
    stack: RunningStack, count: int, tokens: int, started: asyncio.Event | None = None
) -> list[Stream]:
    """Open `count` streams at once and read them to their ends; set `started` when a quarter have some text."""
    streams = [Stream() for _ in range(count)]

    def heard() -> None:
        if started is not None and sum(bool(stream.text) for stream in streams) >= count // 4:
            started.set()

    async with open_client(stack) as client, asyncio.TaskGroup() as group:
        for index, stream in enumerate(streams):
            group.create_task(read(client, index, tokens, stream, heard))
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
        async with open_client(stack) as client, asyncio.TaskGroup() as group:
            for index in range(self.count):
                group.create_task(self._repeat(client, index))

    def assert_undisturbed(self, reference: list[Stream]) -> None:
        """Every client has had answers, and each is what its case gives without a fault."""
        assert {index for index, _ in self.answers} == set(range(self.count))
        for index, stream in self.answers:
            assert_equal(stream, reference[index], f"an answer to case {index}")

    async def _repeat(self, client: openai.AsyncOpenAI, index: int) -> None:
        while not self.over:
            self.answers.append((index, await read(client, index, self.tokens, Stream())))


def assert_undisturbed(disturbed: list[Stream], reference: list[Stream]) -> None:
    """Every client received exactly what it would have received without the fault."""
    for index, (got, expected) in enumerate(zip(disturbed, reference, strict=True)):
        assert_equal(got, expected, f"stream {index}")


def assert_equal(got: Stream, expected: Stream, name: str) -> None:
    """One client received it."""
    assert not got.error, f"{name}: {got.error}"
    assert got.finish == expected.finish == "length", f"{name} ended with {got.finish}"
    assert got.text == expected.text, f"{name} differs"
