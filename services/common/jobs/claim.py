"""A claim of a job, and work that ends with it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from services.common.keys import RedisKeys
from services.common.tasks import end_tasks


@dataclass(frozen=True, slots=True)
class Claim:
    """A job that this owner works on, until another owner claims it."""

    member: str  # tenant, as it appears in Redis keys, and id
    owner: str

    @property
    def tenant(self) -> str:
        """The job's tenant, as it appears in Redis keys."""
        return RedisKeys.parts(self.member)[0]

    @property
    def job_id(self) -> str:
        """The job's id."""
        return RedisKeys.parts(self.member)[1]


class LostClaimError(Exception):
    """Another owner has claimed the job, or it has ended."""


async def run_while_held(work: Coroutine[Any, Any, None], renew: Callable[[], Awaitable[None]], every_s: float) -> None:
    """Run `work`, and `renew` its claim again and again; the first error of either ends both, and is raised."""

    async def keep() -> None:
        while True:
            await asyncio.sleep(every_s)
            await renew()

    keeping, working = asyncio.create_task(keep()), asyncio.create_task(work)
    try:
        await asyncio.wait([keeping, working], return_when=asyncio.FIRST_COMPLETED)
        (working if working.done() else keeping).result()
    finally:
        await end_tasks([keeping, working])
