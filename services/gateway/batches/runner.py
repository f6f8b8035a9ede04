"""Claims jobs, renews the claims while they run, and releases them when this gateway ends."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import random

from services.common.jobs.claim import Claim, LostClaimError, run_while_held
from services.common.tasks import end_tasks, wait_for_event
from services.gateway.batches.run import BatchContext, BatchRun
from services.gateway.drain import Drain
from services.gateway.tenants.redis_guard import RedisAwayError

log = logging.getLogger(__name__)

_JOBS = 4  # at once; they share the gateway's slots
_LOOK_S = 1.0
_RENEW_S = 1.0
_SWEEP_S = 10.0


class BatchRunner:
    """Runs batches on one gateway."""

    def __init__(self, context: BatchContext, gateway_id: str, drain: Drain, woken: asyncio.Event) -> None:
        """`woken` is set when a job was created or has to be ended."""
        self._context = context
        self._gateway_id = gateway_id
        self._drain = drain
        self._stopping = asyncio.Event()
        self._woken = woken
        self._jobs: set[asyncio.Task[None]] = set()
        self._numbers = itertools.count()

    async def run(self) -> None:
        """Run until cancelled."""
        tasks = [asyncio.create_task(work) for work in (self._claim_jobs(), self._keep_house())]
        try:
            with self._drain.listening(self._drained):
                await asyncio.gather(*tasks)
        finally:
            await end_tasks([*tasks, *self._jobs])

    def _drained(self) -> None:
        self._stopping.set()
        self._woken.set()

    async def _claim_jobs(self) -> None:
        while not self._stopping.is_set():
            self._woken.clear()
            claim = None
            try:
                owner = f"{self._gateway_id}/{next(self._numbers)}"
                claim = await self._context.store.claim(owner, room=len(self._jobs) < _JOBS)
            except RedisAwayError:
                log.debug("no look for batches: Redis is away")
            if claim is None:
                await wait_for_event(self._woken, _LOOK_S * random.uniform(0.5, 1.0))
                continue
            job = asyncio.create_task(self._work_on(claim))
            self._jobs.add(job)
            job.add_done_callback(self._over)
            self._context.metrics.batches_running.set(len(self._jobs))

    def _over(self, job: asyncio.Task[None]) -> None:
        self._jobs.discard(job)
        self._context.metrics.batches_running.set(len(self._jobs))
        self._woken.set()

    async def _work_on(self, claim: Claim) -> None:
        run = BatchRun(claim, self._context, self._stopping)
        try:
            await run_while_held(run.run(), lambda: self._renew(claim, run), _RENEW_S)
        except LostClaimError:
            log.info("batch %s: ended, or taken over", claim.job_id)
        except Exception:  # a bug: the next gateway that claims the batch resumes it
            log.exception("batch %s: given up for now", claim.job_id)
            await asyncio.sleep(_RENEW_S)  # else this gateway would claim it again at once
        finally:
            await self._leave(claim)

    async def _renew(self, claim: Claim, run: BatchRun) -> None:
        with contextlib.suppress(RedisAwayError):  # the claim stays valid unless another gateway takes the job
            run.on_status(await self._context.store.renew(claim))

    async def _leave(self, claim: Claim) -> None:
        """Release the claim; a batch that has ended has none."""
        with contextlib.suppress(LostClaimError, RedisAwayError):
            await self._context.store.renew(claim, give_up=True)

    async def _keep_house(self) -> None:
        metrics, store = self._context.metrics, self._context.store
        while True:
            try:
                metrics.batch_storage.set(await store.files.sweep())
                metrics.batches_open.set(await store.open_jobs())
            except RedisAwayError:
                log.debug("no file is removed: Redis is away")
            await asyncio.sleep(_SWEEP_S * random.uniform(0.5, 1.0))
