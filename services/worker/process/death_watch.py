"""Waits for ranks to die: a thread for each, asleep in the kernel."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from services.worker.ipc.life_lock import LifeLock

_LOOK_S = 1.0  # how often a thread sees whether anybody still wants to know


class DeathWatch:
    """Calls `on_death`, on the event loop, with the rank whose lock was given up."""

    def __init__(self, on_death: Callable[[int], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_death = on_death
        self._threads: list[threading.Thread] = []
        self._closing = False

    def watch(self, rank: int, lock: LifeLock) -> None:
        """Wait for a rank that holds its lock."""
        thread = threading.Thread(target=self._wait, args=(rank, lock), name=f"death-of-rank-{rank}", daemon=True)
        self._threads.append(thread)
        thread.start()

    async def close(self) -> None:
        """Return once no thread looks at a lock any more."""
        self._closing = True
        for thread in self._threads:
            await asyncio.to_thread(thread.join)

    def _wait(self, rank: int, lock: LifeLock) -> None:
        while not self._closing:
            if lock.wait_dead(_LOOK_S):
                self._loop.call_soon_threadsafe(self._on_death, rank)
                return
