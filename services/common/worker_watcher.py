"""Runs one long task per leased worker, for routers and the coordinator."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass

from services.common.leases import LEASE_TTL_S, Lease, LeaseWatcher
from services.common.tasks import end_tasks

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Watched:
    lease: Lease
    task: asyncio.Task[None]
    missing_since: float | None = None


@dataclass(frozen=True, slots=True)
class WorkerHooks:
    """The functions of a service that handle workers.

    `follow` runs until cancelled and handles an unreachable worker itself. `connected` returns whether the worker's
    stream is alive. `lost` is called after `follow` has been cancelled because the worker is gone. `concerns` returns
    whether the service follows a worker at all, by its id.
    """

    follow: Callable[[Lease], Coroutine[None, None, None]]
    connected: Callable[[str], bool]
    lost: Callable[[str], None]
    concerns: Callable[[str], bool] = lambda worker_id: True


class WorkerWatcher:
    """Starts, restarts and ends the task of every worker as leases come and go.

    A worker whose lease is missing while its stream is alive is kept for `LEASE_TTL_S`. Otherwise a Redis that restarts
    empty would remove the whole fleet until every worker has renewed its lease. While Redis is away, no worker is added
    or removed.
    """

    def __init__(self, watcher: LeaseWatcher, hooks: WorkerHooks) -> None:
        self._watcher = watcher
        self._hooks = hooks
        self._watched: dict[str, _Watched] = {}
        self.read = asyncio.Event()  # set once Redis has answered
        self.joined = self.left = 0  # totals since the start

    @property
    def waits_for(self) -> str:
        """Why no leases are known yet; empty from Redis's first answer on."""
        return "" if self.read.is_set() else f"leases are not read: {self._watcher.trouble or 'asking Redis'}"

    async def wait_read(self, at_most_s: float) -> None:
        """Return once the leases have been read, or after `at_most_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(at_most_s):
                await self.read.wait()

    async def run(self) -> None:
        """Follow the workers until cancelled; an unexpected error of one task ends all and is raised."""
        async with asyncio.TaskGroup() as group, contextlib.aclosing(self._watcher.watch()) as watch:
            try:
                async for leases in watch:
                    if leases is not None:
                        await self._reconcile(group, leases)
                        self.read.set()
            finally:
                await end_tasks([watched.task for watched in self._watched.values()])

    async def _reconcile(self, group: asyncio.TaskGroup, leases: dict[str, Lease]) -> None:
        leases = {worker_id: lease for worker_id, lease in leases.items() if self._hooks.concerns(worker_id)}
        for worker_id, lease in leases.items():
            watched = self._watched.get(worker_id)
            if watched and (watched.lease.address, watched.lease.model) != (lease.address, lease.model):
                await self._end(worker_id)
                watched = None
            if watched is None:
                log.info("worker %s joins", worker_id, extra={"worker_id": worker_id, "address": lease.address})
                task = group.create_task(self._hooks.follow(lease), name=f"follow {worker_id}")
                self._watched[worker_id] = _Watched(lease, task)
                self.joined += 1
            else:
                watched.lease, watched.missing_since = lease, None
        for worker_id in [w for w in self._watched if w not in leases]:
            if self._is_gone(worker_id):
                await self._end(worker_id)

    def _is_gone(self, worker_id: str) -> bool:
        watched = self._watched[worker_id]
        if not self._hooks.connected(worker_id):
            return True
        now = time.monotonic()
        if watched.missing_since is None:
            watched.missing_since = now
        return now - watched.missing_since >= LEASE_TTL_S

    async def _end(self, worker_id: str) -> None:
        watched = self._watched.pop(worker_id)
        self.left += 1
        await end_tasks([watched.task])
        log.info("worker %s leaves", worker_id, extra={"worker_id": worker_id})
        self._hooks.lost(worker_id)
