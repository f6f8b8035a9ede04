"""Claims jobs, renews the claims while they run, and releases them when this gateway ends."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import random
from collections.abc import Awaitable, Callable
from typing import Protocol

from services.common.jobs.claim import Claim, LostClaimError, run_while_held
from services.common.tasks import end_tasks, wait_for_event
from services.gateway.drain import Drain
from services.gateway.tenants.redis_guard import RedisAwayError

log = logging.getLogger(__name__)

_LOOK_S = 1.0
_RENEW_S = 1.0


class ClaimedRun(Protocol):
    """A claimed job."""

    async def run(self) -> None:
        """Run until the job or this gateway ends; raises LostClaimError."""

    async def renew(self) -> None:
        """Renew the claim; raises LostClaimError and RedisAwayError."""

    async def leave(self) -> None:
        """Release the claim, if the job has not ended; raises LostClaimError and RedisAwayError."""


class JobClaims:
    """Runs the jobs of one kind on one gateway."""

    def __init__(
        self,
        claim: Callable[[str, bool], Awaitable[Claim | None]],
        begin: Callable[[Claim, asyncio.Event], ClaimedRun],
        places: int,
        gateway_id: str,
        drain: Drain,
        woken: asyncio.Event,
        count: Callable[[int], None] = lambda running: None,
    ) -> None:
        """`claim` takes an owner, and whether one of the `places` is free; `begin` the event that this gateway ends.

        `woken` is set when a job was created or has to be ended; `count` gets the number of running jobs.
        """
        self._claim = claim
        self._begin = begin
        self._places = places
        self._gateway_id = gateway_id
        self._drain = drain
        self._woken = woken
        self._count = count
        self._stopping = asyncio.Event()
        self._jobs: set[asyncio.Task[None]] = set()
        self._numbers = itertools.count()

    async def run(self) -> None:
        """Run until cancelled."""
        claiming = asyncio.create_task(self._claim_jobs())
        try:
            with self._drain.listening(self._drained):
                await claiming
                await asyncio.Event().wait()  # the jobs end with this gateway
        finally:
            await end_tasks([claiming, *self._jobs])

    def _drained(self) -> None:
        self._stopping.set()
        self._woken.set()

    async def _claim_jobs(self) -> None:
        while not self._stopping.is_set():
            self._woken.clear()
            claim = None
            try:
                owner = f"{self._gateway_id}/{next(self._numbers)}"
                claim = await self._claim(owner, len(self._jobs) < self._places)
            except RedisAwayError:
                log.debug("no look for jobs: Redis is away")
            if claim is None:
                await wait_for_event(self._woken, _LOOK_S * random.uniform(0.5, 1.0))
                continue
            job = asyncio.create_task(self._work_on(claim))
            self._jobs.add(job)
            job.add_done_callback(self._over)
            self._count(len(self._jobs))

    def _over(self, job: asyncio.Task[None]) -> None:
        self._jobs.discard(job)
        self._count(len(self._jobs))
        self._woken.set()

    async def _work_on(self, claim: Claim) -> None:
        run = self._begin(claim, self._stopping)

        async def renew() -> None:
            with contextlib.suppress(RedisAwayError):  # the claim stays valid unless another gateway takes the job
                await run.renew()

        try:
            await run_while_held(run.run(), renew, _RENEW_S)
        except LostClaimError:
            log.info("job %s: ended, or taken over", claim.job_id)
        except Exception:  # a bug: the next gateway that claims the job resumes it
            log.exception("job %s: given up for now", claim.job_id)
            await asyncio.sleep(_RENEW_S)  # else this gateway would claim it again at once
        finally:
            with contextlib.suppress(LostClaimError, RedisAwayError):  # a job that has ended has no claim
                await run.leave()
