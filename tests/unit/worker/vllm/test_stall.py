"""vLLM's processes count as lost when they are stopped, or when no step ends though requests run."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import subprocess
from collections.abc import Iterator

import pytest

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


@pytest.mark.parametrize("working", [True, False])
async def test_a_stopped_process_is_named(pids: list[int], working: bool) -> None:
    waiting = asyncio.create_task(wait_stalled(pids, lambda: 3, lambda: working))
    os.kill(pids[1], signal.SIGSTOP)
    when = "after step 3" if working else "without work"
    async with asyncio.timeout(120):
        assert await waiting == f"process {pids[1]} is stopped by a signal{',' * (not working)} {when}"


async def test_only_requests_without_steps_are_a_stall(pids: list[int]) -> None:
    limits, steps = StallLimits(asleep_s=0.4, busy_s=60.0), itertools.count()
    stepping = asyncio.create_task(wait_stalled(pids, lambda: next(steps), lambda: True, limits))
    idle = asyncio.create_task(wait_stalled(pids, lambda: 0, lambda: False, limits))
    async with asyncio.timeout(120):
        reason = await wait_stalled(pids, lambda: 5, lambda: True, limits)
    assert reason.startswith(f"process {pids[0]} (and 1 more) sleeps without a heartbeat for ")
    assert reason.endswith("after step 5")
    for task in (stepping, idle):
        assert not task.done()
        task.cancel()
