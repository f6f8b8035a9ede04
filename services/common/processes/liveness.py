"""Detects a process that runs but does not answer: stopped by a signal, deadlocked, or blocked on a dead disk."""

from __future__ import annotations

import asyncio

from services.common.processes.process import Probe

PERIOD_S = 2.0
FAILURES = 3  # in a row: about eleven seconds with the probes' time-outs, while streams wait 30 s for a resumption
_AGAIN_S = 0.5


async def wait_silent(alive: Probe, starting_s: float = 0.0) -> None:
    """Return once a process does not answer. Before its first answer, a starting process has `starting_s`."""
    if starting_s:
        try:
            async with asyncio.timeout(starting_s):
                while not await alive():  # noqa: ASYNC110 - there is no event to wait for
                    await asyncio.sleep(_AGAIN_S)
        except TimeoutError:
            return
    failures = 0
    while failures < FAILURES:
        answers = await alive()
        failures = 0 if answers else failures + 1
        await asyncio.sleep(PERIOD_S if answers else _AGAIN_S)
