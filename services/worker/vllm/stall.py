"""Notices vLLM's processes that are stopped or hang. Their heartbeat is a step, which may take long."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from services.worker.engine.stall import StallDetector, StallLimits, find_stopped

# Asleep: before gateways give up requests that stand still, after 15 s. Busy: a kernel may be compiled at first use.
LIMITS = StallLimits(asleep_s=10.0, busy_s=120.0)
CPU_LIMITS = StallLimits(asleep_s=10.0, busy_s=600.0)  # where a step with a long chunk takes minutes
_LOOK_S = 0.1
_IDLE_LOOK_S = 1.0


async def wait_stalled(
    pids: Sequence[int],
    steps: Callable[[], int],
    working: Callable[[], bool],
    on_signs: Callable[[int], None],
    limits: StallLimits = LIMITS,
) -> str:
    """Wait until a process is stopped by a signal, or no step ends though requests run; returns the reason.

    `steps`: the number of steps done; `working`: whether requests run; `on_signs` gets the signs of life so far.
    """
    detector = StallDetector(pids, steps, lambda: f"after step {steps()}", lambda: limits)
    while True:
        while not working():
            await asyncio.sleep(_IDLE_LOOK_S)
            if stopped := find_stopped(pids):
                return f"process {stopped} is stopped by a signal, without work"
            detector.reset()
        last = time.monotonic()
        await asyncio.sleep(_LOOK_S)
        if working() and (reason := detector.look(time.monotonic() - last)):
            return reason
        on_signs(detector.signs)
