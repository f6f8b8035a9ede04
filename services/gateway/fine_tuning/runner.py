"""The gateways' part in fine-tuning jobs: it checks files before the training, and serves the adapter after it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random

from services.common.fine_tuning.records import JobError, Order, Result
from services.common.fine_tuning.store import Job, TuningClaim, TuningStore, new_event
from services.common.jobs.claim import Claim, LostClaimError, run_while_held
from services.common.redis_client import Argument
from services.common.tasks import wait_for_event
from services.gateway.batches.files import FileGoneError, FileStore
from services.gateway.batches.lines import numbered_lines
from services.gateway.billing.meter import Meter
from services.gateway.errors import ApiError
from services.gateway.fine_tuning.lines import LEAST_EXAMPLES, FileInspector
from services.gateway.fine_tuning.publishing import Publisher, ValidationRefusedError
from services.gateway.tenants.redis_guard import RedisAwayError

log = logging.getLogger(__name__)

_LOOK_S = 1.0
_LEASE_S = 30.0
_AT_ONCE = 200  # lines that are checked before other tasks run
_LATER = (429, 500, 502, 503, 504)


class FineTuningRunner:
    """Takes jobs from the queue, one at a time."""

    def __init__(
        self,
        store: TuningStore,
        files: FileStore,
        publisher: Publisher,
        meter: Meter,
        gateway_id: str,
        woken: asyncio.Event,
    ) -> None:
        """`woken` is set when a job was created."""
        self._store, self._files, self._publisher, self._meter = store, files, publisher, meter
        self._gateway_id, self._woken = gateway_id, woken

    async def run(self) -> None:
        """Run until cancelled."""
        while True:
            self._woken.clear()
            with contextlib.suppress(RedisAwayError):
                while claim := await self._store.claim(self._gateway_id, _LEASE_S, ["check", "publish"]):
                    await self._work_on(claim)
            await wait_for_event(self._woken, _LOOK_S * random.uniform(0.5, 1.0))

    async def _work_on(self, claim: TuningClaim) -> None:
        work = self._check(claim) if claim.job.stage == "check" else self._publish(claim, claim.job)
        try:
            await run_while_held(work, lambda: self._renew(claim), _LEASE_S / 3)
        except LostClaimError:
            log.info("fine-tuning job %s: cancelled, or taken over", claim.member)
        except RedisAwayError:
            log.debug("fine-tuning job %s: Redis is away", claim.member)  # claimed again after the lease
        except Exception as error:  # a bug
            log.exception("fine-tuning job %s: given up for now", claim.member)
            with contextlib.suppress(RedisAwayError, LostClaimError):
                await self._store.fault(claim, error, _LEASE_S)

    async def _renew(self, claim: Claim) -> None:
        with contextlib.suppress(RedisAwayError):  # the claim stays valid unless another gateway takes the job
            await self._store.report(claim, _LEASE_S)

    async def _check(self, claim: TuningClaim) -> None:
        order = claim.job.order
        for field, file_id, least in (
            ("training_file", order.training_file, LEAST_EXAMPLES),
            ("validation_file", order.validation_file, 1),
        ):
            if file_id and (reason := await self._verdict(order, file_id, least)):
                message = f"The job failed due to an invalid {field.replace('_', ' ')} {file_id}: {reason}."
                await self._fail(claim, JobError(code=f"invalid_{field}", message=message, param=field))
                return
        events = [new_event(f"Created fine-tuning job: {order.id}"), new_event("Files validated; the job is queued.")]
        await self._store.report(claim, 0, events, fields={"status": "queued", "stage": "train"})

    async def _verdict(self, order: Order, file_id: str, least: int) -> str:
        inspector = FileInspector(least)
        try:
            file = await self._files.get(order.tenant, file_id)
            async for number, data in numbered_lines(self._files, order.tenant, file_id, file.bytes):
                inspector.look(number, data)
                if number % _AT_ONCE == 0:
                    await asyncio.sleep(0)
        except (FileGoneError, ApiError):
            return "it was deleted"
        return inspector.verdict()

    async def _publish(self, claim: Claim, job: Job) -> None:
        assert job.result is not None
        try:
            await self._publisher.serve(job, job.result)
            losses = {"train_loss": job.result.train_loss}
            if job.result.valid_loss is not None:
                losses["valid_loss"] = job.result.valid_loss
                losses |= await self._served_loss(claim, job, job.result)
            events = await self._store.events(job.order.tenant, job.order.id)
            result_file = await self._publisher.write_results(job, events)
        except ApiError as error:
            await self._fail_or_wait(claim, error)
            return
        await self._meter.count_training(job.order, job.numbers.get("trained_tokens", 0))
        created = [new_event(f"New fine-tuned model created: {job.order.served_name}", data=losses)]
        fields: dict[str, Argument] = {name: repr(value) for name, value in losses.items()}
        fields |= {"model": job.order.served_name, "result_file": result_file}
        await self._store.end(claim, "succeeded", [*created, new_event("The job has successfully completed")], fields)

    async def _served_loss(self, claim: Claim, job: Job, result: Result) -> dict[str, float]:
        if not result.examples:
            return {}
        try:
            return {"served_loss": await self._publisher.served_loss(job, result.examples)}
        except ValidationRefusedError as error:
            message = f"The validation loss through the serving workers was not computed: {error}"
            await self._store.report(claim, _LEASE_S, [new_event(message, "warn")])
            return {}

    async def _fail_or_wait(self, claim: Claim, error: ApiError) -> None:
        if error.status not in _LATER:
            await self._fail(
                claim, JobError(code="not_servable", message=f"The adapter cannot be served: {error.message}")
            )
            return
        log.warning("fine-tuning job %s: not served yet: %s", claim.member, error.message)
        await asyncio.sleep(_LOOK_S)
        await self._store.report(claim, 0)

    async def _fail(self, claim: Claim, error: JobError) -> None:
        await self._store.end(claim, "failed", [new_event(error.message, "error")], {"error": error.model_dump_json()})
