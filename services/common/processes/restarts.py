"""Starts a process again whenever it ends or does not answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic

from services.common.processes.liveness import wait_silent
from services.common.processes.process import ManagedProcess, SpecT

_FIRST_S, _MOST_S = 0.2, 5.0
_STEADY_S = 30.0  # a process that ran for this long is restarted with the shortest delay


@dataclass(frozen=True, slots=True)
class Restarts(Generic[SpecT]):
    """A supervisor's actions around the restarts of its processes."""

    start_timeout_s: float  # a process that has not answered for this long since its start is killed
    report: Callable[[str, str], None]  # called with a process's name and its new state
    before: Callable[[SpecT], None] = lambda _: None  # called before every restart
    after: Callable[[ManagedProcess[SpecT]], None] = lambda _: None  # called after every restart

    async def keep_running(self, process: ManagedProcess[SpecT], *, ready: bool) -> None:
        """Restart a process with a growing delay, until cancelled. `ready`: it has answered already."""
        delay, loop = _FIRST_S, asyncio.get_running_loop()
        starting_s = 0.0 if ready else self.start_timeout_s
        while True:
            started = loop.time()
            status = await self._ended(process, starting_s)
            if loop.time() - started > _STEADY_S:
                delay = _FIRST_S
            self.report(process.spec.name, f"ended with status {status}, starting again in {delay:.1f} s")
            await asyncio.sleep(delay)
            delay = min(2 * delay, _MOST_S)
            self.before(process.spec)
            await process.start()
            starting_s = self.start_timeout_s
            self.after(process)

    async def _ended(self, process: ManagedProcess[SpecT], starting_s: float) -> int:
        """The exit status of a process, once it has ended or has been killed because it does not answer."""
        ended = asyncio.create_task(process.wait())
        silent = asyncio.create_task(wait_silent(process.spec.alive, starting_s))
        try:
            await asyncio.wait((ended, silent), return_when=asyncio.FIRST_COMPLETED)
            if not ended.done():
                silent.result()
                self.report(process.spec.name, f"process {process.pid} does not answer and is killed")
                await process.kill()
            return await ended
        finally:
            ended.cancel()
            silent.cancel()
