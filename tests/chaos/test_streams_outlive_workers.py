"""A stream outlives its worker: real processes, real signals, in mid-stream, byte for byte."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator

import pytest

from tests.chaos.calls import Call, run_calls
from tests.chaos.streams import SteadyLoad, Stream, assert_undisturbed, run_streams
from tests.stack import RunningStack, running_stack

STREAMS = 32
CALLS = 9
TOKENS = 250
PAUSE_S = 8.0  # without a token: 2.5 s of silence and the way to another worker; a stall without it takes 15 s
pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("RYZANSTEIN_DRAIN_S", "0.05")  # shorter than an answer: a worker that ends has to hand off
        with running_stack(tmp_path_factory.mktemp("run"), "--workers", "3", "--tensor-parallel", "1") as running:
            yield running


@pytest.fixture(scope="module")
def reference(stack: RunningStack) -> list[Stream]:
    streams = asyncio.run(run_streams(stack, STREAMS, TOKENS))
    assert_undisturbed(streams, streams)
    return streams


def disturb(stack: RunningStack, reference: list[Stream], fault: Callable[[str], None]) -> Counter[str]:
    """Let the fault happen to the worker that computes most streams, while clients ask.

    How many attempts were interrupted, by cause; all answers are those of an undisturbed run.
    """
    load = SteadyLoad(STREAMS, TOKENS)

    async def main() -> None:
        running = asyncio.create_task(load.run(stack))
        try:
            await load.strike(fault, STREAMS // 8)
        finally:
            load.over = True
            await running

    before = stack.resumes()
    asyncio.run(main())
    load.assert_undisturbed(reference)
    return stack.resumes() - before


def signal_rank(stack: RunningStack, signum: int) -> Callable[[str], None]:
    def fault(worker: str) -> None:
        (rank,) = stack.rank_pids(worker)
        os.kill(rank, signum)

    return fault


def signal_server(stack: RunningStack, signum: int) -> Callable[[str], None]:
    return lambda worker: os.kill(stack.pid_of(worker), signum)


def test_a_killed_rank(stack: RunningStack, reference: list[Stream]) -> None:
    interrupted = disturb(stack, reference, signal_rank(stack, signal.SIGKILL))
    assert interrupted.total()  # on a busy machine gateways may see a stall before the server does
    stack.wait_serving(3)


def test_a_killed_worker_server(stack: RunningStack, reference: list[Stream]) -> None:
    interrupted = disturb(stack, reference, signal_server(stack, signal.SIGKILL))
    assert interrupted.total()
    stack.wait_serving(3)


def test_calls_of_a_killed_worker(stack: RunningStack) -> None:
    """Arguments, too, are those of an undisturbed run; ids are drawn by the gateway, one for each call."""

    async def main() -> list[Call]:
        started = asyncio.Event()
        run = asyncio.create_task(run_calls(stack, CALLS, started))
        await started.wait()
        signal_server(stack, signal.SIGKILL)(stack.busiest())  # all have begun: no state is older than a worker's death
        return await run

    undisturbed = asyncio.run(run_calls(stack, CALLS))
    before = stack.resumes()
    calls = asyncio.run(main())
    assert (stack.resumes() - before).total()
    for call, expected in zip(calls, undisturbed, strict=True):
        assert json.loads(call.arguments)["notes"]
        assert (call.name, call.arguments, call.finish) == (expected.name, expected.arguments, "tool_calls")
    assert len({call_id for call in calls for call_id in call.ids}) == CALLS
    stack.wait_serving(3)


def test_a_stopped_rank(stack: RunningStack, reference: list[Stream]) -> None:
    interrupted = disturb(stack, reference, signal_rank(stack, signal.SIGSTOP))
    assert interrupted.total()
    stack.wait_serving(3)


def test_a_stopped_worker_server(stack: RunningStack, reference: list[Stream]) -> None:
    stopped: dict[str, int] = {}

    def fault(worker: str) -> None:
        stopped[worker] = stack.pid_of(worker)
        os.kill(stopped[worker], signal.SIGSTOP)

    late = stack.late_resumes(PAUSE_S)
    interrupted = disturb(stack, reference, fault)
    assert interrupted["connection_lost"], "its heartbeats are missed"
    # By the gateway's clock: many clients in one process read for seconds what has long been sent.
    assert stack.late_resumes(PAUSE_S) == late
    for worker, pid in stopped.items():
        stack.wait_replaced(worker, pid)
    stack.wait_serving(3)


def test_a_terminated_worker_hands_its_streams_off(stack: RunningStack, reference: list[Stream]) -> None:
    interrupted = disturb(stack, reference, signal_server(stack, signal.SIGTERM))
    assert interrupted["drain"]
    stack.wait_serving(3)


def test_a_rollout_of_all_workers_under_load_loses_nothing(stack: RunningStack, reference: list[Stream]) -> None:
    """One worker after the other is told to end, as a rollout does; the next one when all serve again."""

    load = SteadyLoad(STREAMS, TOKENS)

    def roll_out() -> None:
        for name in ("worker-0", "worker-1", "worker-2"):
            stack.wait_busy(3, STREAMS // 16)
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

    before = stack.resumes()
    asyncio.run(main())
    load.assert_undisturbed(reference)
    assert (stack.resumes() - before)["drain"]


@pytest.mark.parametrize("service", ["router", "kv-coordinator", "redis"])
def test_a_killed_control_service_breaks_no_stream(stack: RunningStack, reference: list[Stream], service: str) -> None:
    victim = stack.pid_of(service)
    disturb(stack, reference, lambda _worker: os.kill(victim, signal.SIGKILL))
    answer = stack.complete(prompt="x = ", max_tokens=4)
    assert answer.status_code == 200, answer.text
    stack.wait_serving(3)
