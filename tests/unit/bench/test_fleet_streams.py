"""A fleet's open streams: their number is bounded, none is waited for without an end, and no fault makes one poison."""

from __future__ import annotations

import asyncio
import math
import random
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from bench.fleet.generator import Generator, Share
from bench.fleet.interruptions import Blow, Interruptions
from bench.fleet.load import FleetAnswer, Load
from bench.fleet.workloads import FleetRequest
from services.gateway.generation.poison import PoisonDetector

EVENT = b'data: {"choices": [{"text": "a", "finish_reason": "length", "worker": {"id": "w", "attempt": 1}}]}\n\n'
REQUEST = FleetRequest((1, 2, 3), 1, (4,))


@pytest.mark.parametrize("seed", range(20))
def test_faults_that_are_borne_never_make_a_request_poison(seed: int) -> None:
    """A gateway's own count, and a client's that gets each chunk up to 4 s after it was sent."""
    draw, client, gateway = random.Random(seed), Interruptions(), PoisonDetector()
    now, n_tokens, attempt, gave, on_trial, n_deaths = 0.0, 0, 1, False, False, 0
    sent: deque[tuple[float, str, int]] = deque()
    for _ in range(400):
        now += draw.choice((0.1, 1.0, 6.0))
        while sent and sent[0][0] <= now:
            client.grew(*sent.popleft())
        blow = Blow(frozenset({f"w{attempt}", *draw.choice(([], ["another"]))}), draw.random() < 0.7)
        if draw.random() < 0.6:
            n_tokens += 1
            gateway.progressed(n_tokens)
            sent.append((now + draw.uniform(0, 4), *(("", 0) if gave else (f"w{attempt}", attempt))))
            gave = True
        elif client.bears(blow):
            client.strike(blow, now)
            if blow.deadly:
                gateway.died(n_tokens, alone=on_trial and gateway.trial_tokens > 0, gave=gave)
            on_trial, attempt, gave, n_deaths = gateway.trial_tokens > 0, attempt + 1, False, n_deaths + blow.deadly
        assert not gateway.convicted
    assert n_deaths >= 2


@asynccontextmanager
async def answering(after_s: float) -> AsyncIterator[str]:
    """A server that answers each request with a token after a time, and sends comments until then; its URL."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n")
        end = asyncio.get_running_loop().time() + after_s
        while asyncio.get_running_loop().time() < end and not writer.is_closing():
            writer.write(b": it goes on\n\n")
            await asyncio.sleep(min(0.05, after_s))
        writer.write(EVENT)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    server.close()


def arrivals(rate: float) -> Iterator[tuple[float, FleetRequest]]:
    return ((number / rate, REQUEST) for number in range(10_000))


async def answers_of(load: Load) -> list[FleetAnswer]:
    end = asyncio.Event()
    end.set()
    async with asyncio.timeout(60):
        return await Generator(load, Share()).run(arrivals(load.rate), end)


async def test_arrivals_stand_still_while_all_streams_are_open() -> None:
    async with answering(0.2) as url:
        answers = await answers_of(Load([url], "any", rate=1000.0, seconds=1.0, streams=4))
    assert not [answer.error for answer in answers if answer.lost()]
    assert 4 <= len(answers) <= 24, "four at a time, at most one after the other for a second"
    starts, ends = sorted(one.at for one in answers), sorted(one.at + one.seconds for one in answers)
    assert all(start >= end for start, end in zip(starts[4:], ends, strict=False)), "a fifth waits for an end"


async def test_stream_that_gets_no_token_ends_as_lost() -> None:
    """Comments keep its connection open, so that no timeout of a read ends it."""
    async with answering(math.inf) as url:
        answers = await answers_of(Load([url], "any", rate=10.0, seconds=0.05, patience_s=0.3))
    assert [answer.error for answer in answers] == ["no token for 0.3 s, after 0 letters"]
    assert answers[0].lost()
