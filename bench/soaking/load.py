"""Constant streaming load: clients that send one request after another and never retry."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import httpx

from bench.soaking.texts import Answer

_TIMEOUT_S = 120
_OPENINGS = (
    "def fibonacci(n):\n",
    "import os\n",
    "class Stack:\n    def push(self, item):\n",
    "for line in open(path):\n    ",
    "The module ",
    "async def main():\n",
    '    """Return ',
    "if __name__ == ",
)


@dataclass(frozen=True)
class Case:
    """A request whose answer is always the same without faults."""

    prompt: str
    temperature: float
    seed: int
    tokens: int
    model: str = "ryzanstein-tiny"


@dataclass
class Served:
    """A client's answer to a case; times are of the monotonic clock."""

    case: int
    began: float
    arrivals: list[float] = field(default_factory=list)
    ended: float = 0.0
    answer: Answer = field(default_factory=Answer)
    error: str = ""

    @property
    def ttft(self) -> float:
        """Seconds until the first message."""
        return self.arrivals[0] - self.began

    @property
    def longest_pause(self) -> float:
        """The longest wait for a message in seconds, including the wait for the first one."""
        times = [self.began, *self.arrivals]
        return max((later - earlier for earlier, later in pairwise(times)), default=0.0)


def make_cases(count: int, tokens: int, seed: int) -> list[Case]:
    """Cases with different prompts, half greedy, half sampled."""
    rng = random.Random(seed)
    return [
        Case(
            prompt=f"{_OPENINGS[i % len(_OPENINGS)]}  # {rng.randrange(10_000)}-{i}\n",
            temperature=0.9 if i % 2 else 0.0,
            seed=rng.randrange(2**31),
            tokens=tokens,
        )
        for i in range(count)
    ]


async def ask(client: httpx.AsyncClient, index: int, case: Case) -> Served:
    """Stream one answer; a failure is in `error`."""
    body = {
        "model": case.model,
        "prompt": case.prompt,
        "max_tokens": case.tokens,
        "temperature": case.temperature,
        "seed": case.seed,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    served, text, ids, finish, counted = Served(index, time.monotonic()), "", [], "", 0
    try:
        async with client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != httpx.codes.OK:
                served.error = f"{response.status_code}: {(await response.aread()).decode(errors='replace')[:300]}"
            async for event in _events(response):
                for choice in event["choices"]:
                    served.arrivals.append(time.monotonic())
                    text += choice["text"]
                    ids += choice.get("token_ids") or []
                    finish = choice["finish_reason"] or finish
                counted = event["usage"]["completion_tokens"] if event.get("usage") else counted
    except (httpx.HTTPError, StreamError) as error:
        served.error = repr(error)
    served.ended = time.monotonic()
    served.answer = Answer(text, tuple(ids), finish)
    if not served.error and not served.arrivals:
        served.error = "the stream was empty"
    if not served.error and counted != len(ids):
        served.error = f"the usage counts {counted} of {len(ids)} tokens"
    return served


class StreamError(Exception):
    """The server ended a stream with an error, or without its end mark."""


async def _events(response: httpx.Response) -> Any:
    async for line in response.aiter_lines():
        if line == "data: [DONE]":
            return
        if line.startswith("data: "):
            event = json.loads(line[6:])
            if "error" in event:
                raise StreamError(event["error"]["message"])
            yield event
    if response.status_code == httpx.codes.OK:
        raise StreamError("the stream ended before [DONE]")


def open_client(url: str, concurrency: int) -> httpx.AsyncClient:
    """An HTTP client with one connection per client of the load."""
    limits = httpx.Limits(max_connections=concurrency)
    return httpx.AsyncClient(base_url=url, timeout=_TIMEOUT_S, limits=limits, trust_env=False)


async def references(client: httpx.AsyncClient, cases: Sequence[Case], concurrency: int) -> list[Answer]:
    """The answers without faults; raises RuntimeError if a request fails."""
    limit = asyncio.Semaphore(concurrency)

    async def one(index: int, case: Case) -> Answer:
        async with limit:
            served = await ask(client, index, case)
        if served.error:
            raise RuntimeError(f"no reference for case {index}: {served.error}")
        return served.answer

    return await asyncio.gather(*(one(index, case) for index, case in enumerate(cases)))


async def keep_asking(
    client: httpx.AsyncClient, cases: Sequence[Case], rng: random.Random, until: float, report: Callable[[Served], None]
) -> None:
    """Run one client: ask random cases until the time `until`, and finish the last one."""
    while time.monotonic() < until:
        index = rng.randrange(len(cases))
        report(await ask(client, index, cases[index]))
