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
        self._ended: list[asyncio.Future[None]] = []  # one of each thread
        self._closing = False

    def watch(self, rank: int, lock: LifeLock) -> None:
        """Watch a rank that holds `lock`."""
        ended: asyncio.Future[None] = self._loop.create_future()
        self._ended.append(ended)
        work = (rank, lock, ended)
        threading.Thread(target=self._wait, args=work, name=f"death-of-rank-{rank}", daemon=True).start()

    async def close(self) -> None:
        """End all threads; no lock is used after the return."""
        self._closing = True
        await asyncio.gather(*self._ended)  # without an executor, which a program that ends no longer has

    def _wait(self, rank: int, lock: LifeLock, ended: asyncio.Future[None]) -> None:
        while not self._closing:
            if lock.wait_dead(_LOOK_S):
                self._loop.call_soon_threadsafe(self._on_death, rank)
                break
        self._loop.call_soon_threadsafe(ended.set_result, None)
