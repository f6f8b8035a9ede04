"""A stream outlives its worker: real processes, real signals, in mid-stream, byte for byte."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator

import pytest

from tests.chaos.streams import SteadyLoad, Stream, assert_equal, assert_undisturbed, run_streams
from tests.stack import RunningStack, running_stack

STREAMS = 64
TOKENS = 120
pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("RYZANSTEIN_DRAIN_S", "0.1")  # shorter than an answer: a worker that ends has to hand off
        with running_stack(tmp_path_factory.mktemp("run"), "--workers", "3", "--tensor-parallel", "1") as running:
            yield running


@pytest.fixture(scope="module")
def reference(stack: RunningStack) -> list[Stream]:
    streams = asyncio.run(run_streams(stack, STREAMS, TOKENS))
    assert_undisturbed(streams, streams)
    return streams


def disturb(stack: RunningStack, fault: Callable[[], None]) -> list[Stream]:
    """Run the streams; the fault happens once half of them have received something."""

    async def main() -> list[Stream]:
        started = asyncio.Event()
        run = asyncio.create_task(run_streams(stack, STREAMS, TOKENS, started))
        await started.wait()
        fault()
        return await run

    return asyncio.run(main())


def test_a_killed_rank(stack: RunningStack, reference: list[Stream]) -> None:
    (rank,) = stack.rank_pids("worker-1")
    assert_undisturbed(disturb(stack, lambda: os.kill(rank, signal.SIGKILL)), reference)
    stack.wait_serving(3)


def test_a_killed_worker_server(stack: RunningStack, reference: list[Stream]) -> None:
    server = stack.pid_of("worker-2")
    assert_undisturbed(disturb(stack, lambda: os.kill(server, signal.SIGKILL)), reference)
    stack.wait_serving(3)


def test_a_stopped_rank(stack: RunningStack, reference: list[Stream]) -> None:
    (rank,) = stack.rank_pids("worker-0")
    assert_undisturbed(disturb(stack, lambda: os.kill(rank, signal.SIGSTOP)), reference)
    stack.wait_serving(3)


def test_a_stopped_worker_server(stack: RunningStack, reference: list[Stream]) -> None:
    server = stack.pid_of("worker-1")
    try:
        assert_undisturbed(disturb(stack, lambda: os.kill(server, signal.SIGSTOP)), reference)
    finally:
        os.kill(server, signal.SIGCONT)
    stack.wait_serving(3)


def test_a_terminated_worker_hands_its_streams_off(stack: RunningStack, reference: list[Stream]) -> None:
    server, drained = stack.pid_of("worker-0"), stack.resumes("drain")
    assert_undisturbed(disturb(stack, lambda: os.kill(server, signal.SIGTERM)), reference)
    assert stack.resumes("drain") > drained
    stack.wait_serving(3)


def test_a_rollout_of_all_workers_under_load_loses_nothing(stack: RunningStack, reference: list[Stream]) -> None:
    """One worker after the other is told to end, as a rollout does; the next one when all serve again."""

    load = SteadyLoad(STREAMS, TOKENS)

    def roll_out() -> None:
        for name in ("worker-0", "worker-1", "worker-2"):
            while load.young < STREAMS // 8:
                time.sleep(0.002)
            before = stack.pid_of(name)
            os.kill(before, signal.SIGTERM)
            stack.wait_replaced(name, before)
            stack.wait_serving(3)

    async def main() -> None:
        running = asyncio.create_task(load.run(stack))
        try:
            await asyncio.to_thread(roll_out)
        finally:
            load.over = True
        await running

    drained = stack.resumes("drain")
    asyncio.run(main())
    assert {index for index, _ in load.answers} == set(range(STREAMS))
    for index, stream in load.answers:
        assert_equal(stream, reference[index], f"an answer to case {index}")
    assert stack.resumes("drain") > drained


@pytest.mark.parametrize("service", ["router", "kv-coordinator", "redis"])
def test_a_killed_control_service_breaks_no_stream(stack: RunningStack, reference: list[Stream], service: str) -> None:
    victim = stack.pid_of(service)
    assert_undisturbed(disturb(stack, lambda: os.kill(victim, signal.SIGKILL)), reference)
    answer = stack.complete(prompt="x = ", max_tokens=4)
    assert answer.status_code == 200, answer.text
    stack.wait_serving(3)
