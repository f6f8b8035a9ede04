"""Detects the death of ranks: one thread per rank sleeps in the kernel until the rank's lock is released."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from services.worker.ipc.life_lock import LifeLock

_LOOK_S = 1.0  # seconds between a thread's checks for `close`


class DeathWatch:
    """Calls `on_death` on the event loop with the rank that died."""

    def __init__(self, on_death: Callable[[int], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_death = on_death
        self._threads: list[threading.Thread] = []
        self._closing = False

    def watch(self, rank: int, lock: LifeLock) -> None:
        """Watch a rank that holds `lock`."""
        thread = threading.Thread(target=self._wait, args=(rank, lock), name=f"death-of-rank-{rank}", daemon=True)
        self._threads.append(thread)
        thread.start()

    async def close(self) -> None:
        """End all threads; no lock is used after the return."""
        self._closing = True
        for thread in self._threads:
            await asyncio.to_thread(thread.join)

    def _wait(self, rank: int, lock: LifeLock) -> None:
        while not self._closing:
            if lock.wait_dead(_LOOK_S):
                self._loop.call_soon_threadsafe(self._on_death, rank)
                return
