"""Wakes a sleeping worker of each model that requests wait for."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable

from services.common.tasks import end_tasks
from services.router.membership import Member
from services.router.pool import Pool
from services.router.residency import Residency, WakeError
from services.router.snapshot import IneligibleReason

# After a refusal, such as for want of memory, another worker is tried, and the same one after this time.
REFUSED_S = 1.0

log = logging.getLogger(__name__)


class Waking:
    """Several routers may wake one worker, since waking is idempotent."""

    def __init__(self, residency: Residency) -> None:
        self._residency = residency
        self._calls: dict[str, asyncio.Task[None]] = {}  # by model
        self._refused: dict[str, float] = {}  # by worker id, until when it is not tried again

    def wake(self, pools: Iterable[Pool]) -> None:
        """Begin to wake a worker of each pool that requests wait for, unless one wakes already."""
        for pool in pools:
            if pool.model not in self._calls and (member := self._choose(pool)):
                call = self._calls[pool.model] = asyncio.create_task(self._wake(member.worker_id))
                call.add_done_callback(lambda _, model=pool.model: self._calls.pop(model))  # type: ignore[misc]

    def _choose(self, pool: Pool) -> Member | None:
        """The worker that woke fastest the last time; None while one wakes, or none can be woken."""
        members, now = pool.members.values(), time.monotonic()
        if any(member.verdict is IneligibleReason.WAKING for member in members):
            return None
        self._refused = {worker_id: until for worker_id, until in self._refused.items() if until > now}
        sleeping = [
            member
            for member in members
            if member.verdict is IneligibleReason.SLEEPING and member.worker_id not in self._refused
        ]
        return min(sleeping, key=lambda member: (member.state.wake_ms, member.worker_id), default=None)

    async def _wake(self, worker_id: str) -> None:
        try:
            await self._residency.wake(worker_id)
        except WakeError as error:
            self._refused[worker_id] = time.monotonic() + REFUSED_S
            log.warning("requests wait for a sleeping model: %s", error, extra={"worker_id": worker_id})
        else:
            log.info("worker %s wakes, since requests wait for it", worker_id, extra={"worker_id": worker_id})

    async def close(self) -> None:
        """End the calls."""
        await end_tasks(list(self._calls.values()))
