"""vLLM's processes count as lost when they are stopped, or when no step ends though requests run."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from services.common.tasks import end_tasks
from services.worker.engine.stall import StallLimits
from services.worker.vllm.stall import wait_stalled


@pytest.fixture
def pids() -> Iterator[list[int]]:
    """A process that schedules, and a rank; both sleep."""
    processes = [subprocess.Popen(["sleep", "600"]) for _ in range(2)]
    yield [process.pid for process in processes]
    for process in processes:
        process.kill()
        process.wait()


@pytest.fixture
def spinning() -> Iterator[int]:
    """A process that uses CPU time."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    yield process.pid
    process.kill()
    process.wait()


def ignore(n_signs: int) -> None: ...


@pytest.mark.parametrize("working", [True, False])
async def test_a_stopped_process_is_named(pids: list[int], working: bool) -> None:
    waiting = asyncio.create_task(wait_stalled(pids, lambda: 3, lambda: working, ignore))
    os.kill(pids[1], signal.SIGSTOP)
    when = "after step 3" if working else "without work"
    async with asyncio.timeout(120):
        assert await waiting == f"process {pids[1]} is stopped by a signal{',' * (not working)} {when}"


async def test_signs_of_life_come_with_steps_and_with_cpu_time_and_not_from_sleepers(
    pids: list[int], spinning: int
) -> None:
    ticks, seen = itertools.count(), {"asleep": 0, "spinning": 0, "stepping": 0}
    enough = asyncio.Event()

    def watch(name: str, watched: list[int], steps: Callable[[], int]) -> asyncio.Task[str]:
        def see(n_signs: int) -> None:
            seen[name] = n_signs
            if min(seen["spinning"], seen["stepping"]) >= 5:
                enough.set()

        return asyncio.create_task(wait_stalled(watched, steps, lambda: True, see))

    tasks = [
        watch("asleep", pids, lambda: 5),
        watch("spinning", [spinning], lambda: 5),
        watch("stepping", pids, lambda: next(ticks)),
    ]
    try:
        async with asyncio.timeout(120):
            await enough.wait()
        assert seen["asleep"] == 0
    finally:
        await end_tasks(tasks)


async def test_only_requests_without_steps_are_a_stall(pids: list[int]) -> None:
    limits, steps = StallLimits(asleep_s=0.4, busy_s=60.0), itertools.count()
    stepping = asyncio.create_task(wait_stalled(pids, lambda: next(steps), lambda: True, ignore, limits))
    idle = asyncio.create_task(wait_stalled(pids, lambda: 0, lambda: False, ignore, limits))
    async with asyncio.timeout(120):
        reason = await wait_stalled(pids, lambda: 5, lambda: True, ignore, limits)
    assert reason.startswith(f"process {pids[0]} (and 1 more) sleeps without a heartbeat for ")
    assert reason.endswith("after step 5")
    for task in (stepping, idle):
        assert not task.done()
        task.cancel()
