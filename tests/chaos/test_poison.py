"""A request that kills ranks is convicted, after three at most, and no other one, however many workers die."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path

import openai
import pytest

from tests.chaos.conftest import KILLER, TOKENS
from tests.chaos.streams import ClientStream, SteadyLoad, Strike
from tests.stack import RunningStack

NEIGHBOURS, INNOCENTS = 40, 64
MANY = 16  # so many of them a worker computes when it is struck: one of three has more
LEFT = 4  # streams still open on one of the two workers that took over
pytestmark = pytest.mark.timeout(900)


def test_a_killer_beside_neighbours(stack: RunningStack, reference: list[ClientStream]) -> None:
    load = SteadyLoad(NEIGHBOURS, TOKENS)  # whenever the killer is computed, others are in its steps

    async def main() -> None:
        running = asyncio.create_task(load.run(stack))
        try:
            await asyncio.to_thread(stack.wait_busy, 3)
            async with openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="unused", max_retries=0) as client:
                with pytest.raises(openai.InternalServerError) as failure:
                    await client.completions.create(model="ryzanstein-tiny", prompt=KILLER, max_tokens=8)
        finally:
            load.over = True
        assert failure.value.code == "poison"
        assert failure.value.response.headers["x-request-id"] in poisonous(stack)
        await running

    lost, resumed = losses(stack), stack.resumes()
    asyncio.run(main())
    load.assert_undisturbed(reference)
    stack.wait_serving(3)  # their logs tell of the losses by then
    assert losses(stack) - lost == 3, "two deaths among others, one with no other suspect"
    assert (stack.resumes() - resumed)["ranks_lost"] > 3, "neighbours were in the plans that killed"


def poisonous(stack: RunningStack) -> set[str]:
    """The requests that the gateway's log names as such."""
    lines = (stack.folder / "logs" / "gateway.log").read_text().splitlines()
    return {json.loads(line)["request_id"] for line in lines if "poison" in line}


def losses(stack: RunningStack) -> int:
    """How often workers have lost their ranks."""
    logs = (stack.folder / "logs").glob("worker-*.log")
    return sum(log.read_text().count("ranks lost: ") for log in logs)


def test_innocents_through_six_deaths_two_by_two(stack: RunningStack, reference: list[ClientStream]) -> None:
    load, strikes, stopped = SteadyLoad(INNOCENTS, TOKENS), list[Strike](), list[int]()

    def stop_server(worker: str) -> None:
        stopped.append(stack.pid_of(worker))
        os.kill(stopped[-1], signal.SIGSTOP)

    def kill_server(worker: str) -> None:
        os.kill(stack.pid_of(worker), signal.SIGKILL)

    def kill_ranks(worker: str) -> None:
        (rank,) = stack.rank_pids(worker)
        os.kill(rank, signal.SIGKILL)

    async def main() -> None:
        running = asyncio.create_task(load.run(stack))
        try:
            # The second one while the first one's streams wait in silence, the others under those that go on.
            for first, second, least, lost in (
                (stop_server, kill_server, MANY, 0),
                (kill_ranks, kill_ranks, LEFT, 1),
                (kill_server, kill_ranks, LEFT, 1),
            ):
                await load.settle()
                strikes.append(await load.strike(first, MANY))
                strikes.append(await load.strike(second, least, lost))
        finally:
            load.over = True
            await running

    resumed = stack.resumes()
    try:
        asyncio.run(main())
    finally:
        for pid in stopped:
            if Path(f"/proc/{pid}").exists():
                os.kill(pid, signal.SIGCONT)
    load.assert_undisturbed(reference)
    assert all(strike.outlived for strike in strikes), "each one meets streams, which go on elsewhere"
    assert sum(len(stream.workers) > 2 for _, stream in load.answers) >= 2 * LEFT, "many have lost more than one worker"
    stack.wait_serving(3)
    assert (stack.resumes() - resumed).total() > INNOCENTS
