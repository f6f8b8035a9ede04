"""Many concurrent streams against a running stack, and what each of them received."""

from __future__ import annotations

import asyncio
import time
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


@dataclass
class Stream:
    """What one client received."""

    text: str = ""
    finish: str | None = None
    error: str = ""
    arrivals: list[float] = field(default_factory=list)

    @property
    def longest_pause(self) -> float:
        return max((b - a for a, b in zip(self.arrivals, self.arrivals[1:], strict=False)), default=0.0)


async def run_streams(
    stack: RunningStack, count: int, tokens: int, started: asyncio.Event | None = None
) -> list[Stream]:
    """Open `count` streams at once, half greedy, half sampled with a seed; set `started` when half have a token."""
    client = openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="unused", max_retries=0, timeout=120)
    streams = [Stream() for _ in range(count)]

    async def read(index: int, stream: Stream) -> None:
        try:
            events = await client.completions.create(
                model="ryzanstein-tiny",
                prompt=PROMPTS[index % len(PROMPTS)] + f"  # {index}\n",
                max_tokens=tokens,
                temperature=0.9 if index % 2 else 0.0,
                seed=index,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            async for event in events:
                stream.arrivals.append(time.monotonic())
                stream.text += event.choices[0].text
                stream.finish = event.choices[0].finish_reason or stream.finish
                if started is not None and sum(bool(s.arrivals) for s in streams) >= count // 2:
                    started.set()
        except openai.APIError as error:
            stream.error = repr(error)

    await asyncio.gather(*(read(index, stream) for index, stream in enumerate(streams)))
    await client.close()
    return streams


def assert_undisturbed(disturbed: list[Stream], reference: list[Stream]) -> None:
    """Every client received exactly what it would have received without the fault."""
    for index, (got, expected) in enumerate(zip(disturbed, reference, strict=True)):
        assert not got.error, f"stream {index}: {got.error}"
        assert got.finish == expected.finish == "length", f"stream {index} ended with {got.finish}"
        assert got.text == expected.text, f"stream {index} differs"
