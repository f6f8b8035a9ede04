"""Notices a process that runs and answers nobody: stopped by a signal, in a dead-lock, or waiting for a dead disk."""

from __future__ import annotations

import asyncio

from services.cli.stack.probes import Probe

PERIOD_S = 2.0
FAILURES = 3  # in a row; with a probe's own time limit about eleven seconds: streams wait for 30 s to be continued
_AGAIN_S = 0.5


async def wait_silent(alive: Probe, starting_s: float = 0.0) -> None:
    """Return once a process answers nobody. One that starts may be silent for `starting_s` before it first answers."""
    if starting_s:
        try:
            async with asyncio.timeout(starting_s):
                while not await alive():  # noqa: ASYNC110 - a process sends no event
                    await asyncio.sleep(_AGAIN_S)
        except TimeoutError:
            return
    failures = 0
    while failures < FAILURES:
        answers = await alive()
        failures = 0 if answers else failures + 1
        await asyncio.sleep(PERIOD_S if answers else _AGAIN_S)
