"""Runs batches on one gateway, and removes expired files."""

from __future__ import annotations

import asyncio
import logging
import random

from services.common.tasks import end_tasks
from services.gateway.batches.run import BatchContext, BatchRun
from services.gateway.claims import JobClaims
from services.gateway.drain import Drain
from services.gateway.tenants.redis_guard import RedisAwayError

log = logging.getLogger(__name__)

_JOBS = 4  # at once; they share the gateway's slots
_SWEEP_S = 10.0


class BatchRunner:
    """Runs batches on one gateway."""

    def __init__(self, context: BatchContext, gateway_id: str, drain: Drain, woken: asyncio.Event) -> None:
        """`woken` is set when a job was created or has to be ended."""
        self._context = context
        store, count = context.store, context.metrics.batches_running.set
        self._claims = JobClaims(
            lambda owner, room: store.claim(owner, room=room),
            lambda claim, stopping: BatchRun(claim, context, stopping),
            _JOBS,
            gateway_id,
            drain,
            woken,
            count,
        )

    async def run(self) -> None:
        """Run until cancelled."""
        tasks = [asyncio.create_task(work) for work in (self._claims.run(), self._keep_house())]
        try:
            await asyncio.gather(*tasks)
        finally:
            await end_tasks(tasks)

    async def _keep_house(self) -> None:
        metrics, store = self._context.metrics, self._context.store
        while True:
            try:
                metrics.batch_storage.set(await store.files.sweep())
                metrics.batches_open.set(await store.open_jobs())
            except RedisAwayError:
                log.debug("no file is removed: Redis is away")
            await asyncio.sleep(_SWEEP_S * random.uniform(0.5, 1.0))
