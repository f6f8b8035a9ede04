"""A request that kills ranks is convicted, after three at most; nobody else is, however many workers die."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.chaos.streams import SteadyLoad, Stream, assert_undisturbed, run_streams
from tests.stack import RunningStack, running_stack

KILLER = [7, 11, 13, 17, 19, 23]
PLANTED = Path(__file__).parent / "planted"
NEIGHBOURS, INNOCENTS = 40, 64
TOKENS = 250
pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("RYZANSTEIN_TEST_KILLER", ",".join(map(str, KILLER)))
        environment.setenv("PYTHONPATH", os.pathsep.join([str(PLANTED), *filter(None, [os.getenv("PYTHONPATH")])]))
        with running_stack(tmp_path_factory.mktemp("run"), "--workers", "3", "--tensor-parallel", "1") as running:
            yield running


@pytest.fixture(scope="module")
def reference(stack: RunningStack) -> list[Stream]:
    streams = asyncio.run(run_streams(stack, INNOCENTS, TOKENS))
    assert_undisturbed(streams, streams)
    return streams


def test_a_killer_beside_neighbours(stack: RunningStack, reference: list[Stream]) -> None:
    load = SteadyLoad(NEIGHBOURS, TOKENS)  # whenever the killer is computed, others are beside it

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
    assert losses(stack) - lost == 3, "two deaths among others, one beside no other suspect"
    assert (stack.resumes() - resumed)["ranks_lost"] > 3, "neighbours were in the plans that killed"


def poisonous(stack: RunningStack) -> set[str]:
    """The requests that the gateway's log names as such."""
    lines = (stack.folder / "logs" / "gateway.log").read_text().splitlines()
    return {json.loads(line)["request_id"] for line in lines if "poison" in line}


def losses(stack: RunningStack) -> int:
    """How often workers have lost their ranks."""
    logs = (stack.folder / "logs").glob("worker-*.log")
    return sum(log.read_text().count("ranks lost: ") for log in logs)


def test_innocents_through_six_deaths_in_eight_seconds(stack: RunningStack, reference: list[Stream]) -> None:
    stopped = []

    def strike(number: int) -> None:
        worker = stack.busiest()
        if number % 3 == 0:
            os.kill(stack.pid_of(worker), signal.SIGKILL)
        elif number == 4:
            stopped.append(stack.pid_of(worker))
            os.kill(stopped[-1], signal.SIGSTOP)
        else:
            for rank in stack.rank_pids(worker):
                os.kill(rank, signal.SIGKILL)

    async def main() -> list[Stream]:
        started = asyncio.Event()
        run = asyncio.create_task(run_streams(stack, INNOCENTS, TOKENS, started))
        await started.wait()
        for number in range(6):
            await asyncio.to_thread(strike, number)
            await asyncio.sleep(1.3)
        return await run

    resumed = stack.resumes()
    try:
        assert_undisturbed(asyncio.run(main()), reference)
    finally:
        for pid in stopped:
            if Path(f"/proc/{pid}").exists():
                os.kill(pid, signal.SIGCONT)
    stack.wait_serving(3)
    assert (stack.resumes() - resumed).total() > INNOCENTS, "many have lost more than one worker"
