"""A runner of batches ends when it is cancelled, for every reaction of its Redis client."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from services.common.tasks import end_tasks
from services.gateway.batches.run import BatchContext
from services.gateway.batches.runner import BatchRunner
from services.gateway.drain import Drain


async def test_a_cancellation_that_redis_swallows_is_said_again() -> None:
    """A gateway whose Redis had come back did not end on SIGTERM: cancelled once, its sweep went on for ever."""
    swallowed = asyncio.Event()

    class Store:
        async def claim(self, owner: str, *, room: bool) -> None:
            return None

        async def sweep(self) -> int:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                swallowed.set()
            return 0

        async def open_jobs(self) -> int:
            return 0

        @property
        def files(self) -> Store:
            return self

    gauge = SimpleNamespace(set=lambda value: None)
    metrics = SimpleNamespace(batch_storage=gauge, batches_open=gauge, batches_running=gauge)
    context = cast("BatchContext", SimpleNamespace(store=cast("Any", Store()), metrics=metrics))
    runner = BatchRunner(context, "gateway", drain=Drain(), woken=asyncio.Event())
    running = asyncio.create_task(runner.run())
    await asyncio.sleep(0.01)  # its tasks wait for Redis
    async with asyncio.timeout(60):
        await end_tasks([running])
    assert swallowed.is_set()
