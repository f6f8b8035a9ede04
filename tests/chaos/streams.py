"""Many concurrent streams against a running stack, and what each of them received."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
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
CONSTRAINED = r"([a-z_]{2,9}( = [0-9]{1,4})?\n)*"  # grammar of every other pair of cases; it never has to end
TIMEOUT_S = 300  # time limit per stream on a busy machine
CLEARING_TOKENS = 16  # so many after a death the gateway holds nothing against a stream
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%b"


class BadAnswerError(Exception):
    """Not a stream, or one with an error in it or without its end."""


@dataclass
class ClientStream:
    """The events that one client received, with the workers that sent them."""

    text: str = ""
    finish: str | None = None
    error: str = ""
    workers: list[str] = field(default_factory=list)  # that gave it tokens, one after the other
    pieces: int = 0  # from the last of them; each is a token at least
    computed: bool = False  # by the last of them, as far as the client can know
    struck: bool = False  # a worker was lost, perhaps under it, and not enough pieces came since

    @property
    def under_way(self) -> bool:
        return self.finish is None and not self.error

    def hear(self, choice: dict[str, Any]) -> None:
        """The next piece."""
        if "worker" in choice:
            self.workers.append(choice["worker"]["id"])
            self.computed, self.pieces = True, 0
        self.pieces += self.computed
        self.struck = self.struck and self.pieces < CLEARING_TOKENS
        self.text += choice["text"]
        self.finish = choice["finish_reason"] or self.finish

    def lose(self, worker: str) -> bool:
        """A worker is lost. Whether it was, by what the client knows, the one that computes this stream."""
        met = self.computed and self.workers[-1] == worker
        if met or not self.computed:
            self.computed, self.struck, self.pieces = False, True, 0
        return met


async def read(stack: RunningStack, index: int, tokens: int, stream: ClientStream) -> ClientStream:
    """Case `index`, streamed into `stream`: the even ones are greedy, the others sampled with a seed."""
    body = {
        "model": "ryzanstein-tiny",
        "prompt": PROMPTS[index % len(PROMPTS)] + f"  # {index}\n",
        "max_tokens": tokens,
        "temperature": 0.9 if index % 2 else 0.0,
        "seed": index,
        "stream": True,
        "stream_options": {"include_workers": True},
        "ignore_eos": True,
        "session_id": f"client-{index}",  # so that all workers have some
        **({"guided_regex": CONSTRAINED} if index % 4 > 1 else {}),
    }
    try:
        async with asyncio.timeout(TIMEOUT_S), aclosing(_events(stack.port, body)) as events:
            async for event in events:
                (choice,) = event["choices"]
                stream.hear(choice)
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


async def run_streams(stack: RunningStack, count: int, tokens: int) -> list[ClientStream]:
    """Open `count` streams at once and read them to their ends."""
    async with asyncio.TaskGroup() as group:
        running = [group.create_task(read(stack, index, tokens, ClientStream())) for index in range(count)]
    return [stream.result() for stream in running]


@dataclass
class SteadyLoad:
    """`count` clients, each of which asks its case again until the load is over."""

    count: int
    tokens: int
    over: bool = False
    answers: list[tuple[int, ClientStream]] = field(default_factory=list)  # the cases and what came of each asking

    async def run(self, stack: RunningStack) -> None:
        """Ask until `over`, then read what is under way to its end."""
        async with asyncio.TaskGroup() as group:
            for index in range(self.count):
                group.create_task(self._repeat(stack, index))

    async def strike(self, fault: Callable[[str], None], least: int, lost: int = 0) -> Strike:
        """Let `fault` happen to the worker that computes most streams that have lost `lost` workers: `least`, at least.

        By what the clients have received: the router's word may be older than a worker's death.
        """
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                computed = Counter(s.workers[-1] for s in self.under_way if s.computed and len(s.workers) > lost)
                if max(computed.values(), default=0) >= least:
                    break
                await asyncio.sleep(0.005)
        ((worker, _),) = computed.most_common(1)
        fault(worker)
        return Strike([(stream, len(stream.workers)) for stream in self.under_way if stream.lose(worker)])

    async def settle(self) -> None:
        """Return once all clients have been heard, and no stream could be held to have killed its workers.

        That is who met two deaths at one place: another worker has gone on with each struck one by enough tokens.
        """
        async with asyncio.timeout(TIMEOUT_S):
            while not self._settled():  # noqa: ASYNC110  # the clients say nothing of it
                await asyncio.sleep(0.005)

    def _settled(self) -> bool:
        heard = {index for index, stream in self.answers if stream.workers}
        return len(heard) == self.count and not any(stream.struck for stream in self.under_way)

    @property
    def under_way(self) -> list[ClientStream]:
        """The tokens that clients read now."""
        return [stream for _, stream in self.answers if stream.under_way]

    def assert_undisturbed(self, reference: list[ClientStream]) -> None:
        """Every client has had answers, and each is what its case gives without a fault."""
        assert {index for index, _ in self.answers} == set(range(self.count))
        for index, stream in self.answers:
            assert_equal(stream, reference[index], f"an answer to case {index}")

    async def _repeat(self, stack: RunningStack, index: int) -> None:
        while not self.over:
            stream = ClientStream()
            self.answers.append((index, stream))
            await read(stack, index, self.tokens, stream)


@dataclass(frozen=True)
class Strike:
    """A worker was lost."""

    met: list[tuple[ClientStream, int]]  # the streams that it computed, and their workers so far

    @property
    def outlived(self) -> int:
        """How many of them another worker has gone on with."""
        return sum(len(stream.workers) > before for stream, before in self.met)


def assert_undisturbed(disturbed: list[ClientStream], reference: list[ClientStream]) -> None:
    """Every client received exactly what it would have received without the fault."""
    for index, (got, expected) in enumerate(zip(disturbed, reference, strict=True)):
        assert_equal(got, expected, f"stream {index}")


def assert_equal(got: ClientStream, expected: ClientStream, name: str) -> None:
    """One client received it."""
    assert not got.error, f"{name}: {got.error}"
    assert got.finish == expected.finish == "length", f"{name} ended with {got.finish}"
    assert got.text == expected.text, f"{name} differs"
