"""Batches in Redis: their state, the gateway that works on them, and the lines that have been written."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast

import msgspec

from services.common.jobs.claim import Claim, LostClaimError
from services.common.jobs.queue import END, JobQueue, status_of
from services.common.keys import RedisKeys
from services.common.redis_client import Argument
from services.gateway.batches import scripts
from services.gateway.batches.files import FileStore
from services.gateway.batches.objects import (
    OPEN,
    Batch,
    BatchError,
    BatchErrors,
    Plan,
    RequestCounts,
    Status,
    new_object_id,
    usage_of,
)
from services.gateway.errors import ApiError, invalid

LEASE_S = 10.0  # a gateway that renews nothing for so long loses its batches to another one
_MOST_OPEN = 100  # per tenant
_NO_LIMIT = 1 << 62
_TIMES = (
    "in_progress_at", "finalizing_at", "completed_at", "failed_at", "expired_at", "cancelling_at", "cancelled_at",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result that is written for a line."""

    number: int
    kind: Literal["completed", "failed"]
    data: bytes
    tokens: tuple[int, int, int] = (0, 0, 0)  # input, cached input, output


class BatchStore:
    """The batches of all tenants. All methods raise :class:`RedisAwayError`."""

    def __init__(self, files: FileStore) -> None:
        self.files = files
        self._guard = files.guard
        self._keys: RedisKeys = files.keys
        client = self._guard.client
        life_s = files.limits.life_s
        self._queue = JobQueue(client, files.keys.batch_jobs, self._guard.run, life_s, scripts.CHOICE)
        self._record = client.register_script(scripts.RECORD)
        self._finish = client.register_script(scripts.FINISH)

    # --- for clients -----------------------------------------------------------------------------------------------

    async def create(self, tenant: str, plan: Plan) -> Batch:
        """Create a batch; raises :class:`ApiError` (429)."""
        batch_id = new_object_id("batch_")
        fields: dict[str, Argument] = {
            "plan": msgspec.json.encode(plan), "status": "validating", "expires_at": plan.expires_at,
        }  # fmt: skip
        if not await self._queue.create(self._keys.member(tenant, batch_id), fields, _MOST_OPEN):
            message = f"At most {_MOST_OPEN} of your batches may be open at once."
            raise ApiError(429, message, "batches", code="too_many_batches", retry_after_s=60)
        return await self.get(tenant, batch_id)

    async def get(self, tenant: str, batch_id: str) -> Batch:
        """One batch; raises :class:`ApiError` (404)."""
        fields = await self._queue.fields(self._keys.member(tenant, batch_id))
        if "plan" not in fields:
            message = f"No batch found with id '{batch_id}'."
            raise ApiError(404, message, "invalid_request_error", "id", "batch_not_found")
        return _batch_of(batch_id, fields)

    async def list(self, tenant: str, after: str, limit: int) -> tuple[list[Batch], bool]:
        """The latest batches, or those before `after`, and whether there are more."""
        client, key = self._guard.client, self._queue.keys.index(tenant)
        batches: list[Batch] = []
        for batch_id in [one for one in await self._queue.ids(tenant) if not after or one < after]:
            fields = await self._queue.fields(self._keys.member(tenant, batch_id))
            if "plan" not in fields:  # the batch has expired
                await self._guard.run(partial(client.zrem, key, batch_id))
                continue
            if len(batches) == limit:
                return batches, True
            batches.append(_batch_of(batch_id, fields))
        return batches, False

    async def cancel(self, tenant: str, batch_id: str) -> Batch:
        """Request the end of a batch; raises :class:`ApiError` (404, 400).

        The next gateway that claims a job without an owner ends it.
        """
        turns = dict.fromkeys(("validating", "in_progress"), "cancelling")
        await self._queue.turn(self._keys.member(tenant, batch_id), turns, {"cancelling_at": int(time.time())})
        batch = await self.get(tenant, batch_id)
        if batch.status != "cancelling":
            raise invalid(f"Cannot cancel a batch with status '{batch.status}'.", None, "batch_not_cancellable")
        return batch

    # --- for gateways ----------------------------------------------------------------------------------------------

    async def open_jobs(self) -> int:
        """The number of open batches of all tenants."""
        client, key = self._guard.client, self._queue.keys.queue
        return int(await self._guard.run(lambda: client.zcard(key)))

    async def claim(self, owner: str, *, room: bool) -> Claim | None:
        """Claim a job without an owner; without `room`, only a job that has to be ended."""
        return await self._queue.claim(owner, LEASE_S, int(room))

    async def renew(self, claim: Claim, *, give_up: bool = False) -> Status:
        """Renew a claim, or give it up; returns the job's status. Raises :class:`LostClaimError`."""
        return _status(await self._queue.write(claim, {}, {}, 0 if give_up else LEASE_S))

    async def load(self, claim: Claim) -> tuple[Plan, Status]:
        """The job's plan and status; raises :class:`LostClaimError`."""
        fields = await self._queue.fields(claim.member)
        if "plan" not in fields:
            raise LostClaimError
        return msgspec.json.decode(fields["plan"], type=Plan), _status(fields["status"].decode())

    async def written(self, claim: Claim) -> bytes:
        """A bitmap of the lines that have been written; lines count from 1, so bit 0 is unused."""
        client, key = self._guard.client, self._keys.batch_done(claim.member)
        bits: Any = await self._guard.run(lambda: client.get(key))
        return bits or b""

    async def advance(self, claim: Claim, before: Status, after: Status, **fields: int) -> Status:
        """Change the status from `before` to `after`; returns the new status. Raises :class:`LostClaimError`."""
        return _status(await self._queue.write(claim, {before: after}, {f"{after}_at": int(time.time()), **fields}))

    async def record(
        self, claim: Claim, plan: Plan, outcomes: Sequence[Outcome], *, beyond_limits: bool = False
    ) -> Status | None:
        """Write lines that are not written yet; None: storage is full. Raises :class:`LostClaimError`."""
        keys, member, limits = self._keys, claim.member, self.files.limits
        where = [
            self._queue.keys.owners, self._queue.keys.job(member), keys.batch_done(member), keys.file_sizes,
            keys.file_usage, keys.file_ends, keys.file_pieces(claim.tenant, plan.output_file_id),
            keys.file_pieces(claim.tenant, plan.error_file_id),
        ]  # fmt: skip
        args: list[Argument] = [
            member, claim.owner, keys.usage_field(claim.tenant), _NO_LIMIT if beyond_limits else limits.tenant,
            _NO_LIMIT if beyond_limits else limits.total, plan.expires_at - plan.created_at + limits.life_s,
            keys.member(claim.tenant, plan.output_file_id), keys.member(claim.tenant, plan.error_file_id),
            *(outcomes[0].tokens if len(outcomes) == 1 else (0, 0, 0)),
            *(part for outcome in outcomes for part in (outcome.number, outcome.kind, outcome.data)),
        ]  # fmt: skip
        answer: Any = await self._guard.run(lambda: self._record(keys=where, args=args))
        return None if answer == b"full" else _status(status_of(answer))

    async def finish(
        self, claim: Claim, plan: Plan, status: Status, errors: Sequence[BatchError] = (), **numbers: int
    ) -> None:
        """End a batch and publish its files. Raises :class:`LostClaimError`."""
        keys, now, life_s = self._keys, int(time.time()), self.files.limits.life_s
        fields: dict[str, Argument] = {f"{status}_at": now, **numbers}
        if errors:
            fields["errors"] = msgspec.json.encode(BatchErrors(data=list(errors)))
        where, args = self._queue.turn_arguments(
            claim.member, claim.owner, dict.fromkeys(OPEN, status), fields, END, {}
        )
        where = [keys.batch_done(claim.member), keys.files(claim.tenant), keys.file_sizes, keys.file_ends, *where]
        files: list[Argument] = [life_s]
        for file_id, kind in ((plan.output_file_id, "output"), (plan.error_file_id, "error")):
            files += [file_id, keys.member(claim.tenant, file_id), _file_head(claim, file_id, kind, now, life_s)]
        answer: Any = await self._guard.run(lambda: self._finish(keys=where, args=[*files, *args]))
        status_of(answer)


def _status(text: str) -> Status:
    return cast("Status", text)  # no other one is ever written


def _file_head(claim: Claim, file_id: str, kind: str, now: int, life_s: int) -> bytes:
    """The JSON of a result file up to the size, which the script adds."""
    file = {
        "id": file_id, "object": "file", "created_at": now, "expires_at": now + life_s,
        "filename": f"{claim.job_id}_{kind}.jsonl", "purpose": "batch_output", "status": "processed",
        "status_details": None,
    }  # fmt: skip
    return msgspec.json.encode(file)[:-1] + b',"bytes":'


def _batch_of(batch_id: str, fields: dict[str, bytes]) -> Batch:
    plan, status = msgspec.json.decode(fields["plan"], type=Plan), _status(fields["status"].decode())

    def number(name: str) -> int:
        return int(fields.get(name, 0))

    counts = RequestCounts(number("total"), number("completed"), number("failed"))
    over = status not in OPEN
    times: dict[str, Any] = {name: int(fields[name]) for name in _TIMES if name in fields}
    return Batch(
        id=batch_id,
        endpoint=plan.endpoint,
        errors=msgspec.json.decode(fields["errors"], type=BatchErrors) if "errors" in fields else None,
        input_file_id=plan.input_file_id,
        completion_window=plan.completion_window,
        status=status,
        output_file_id=plan.output_file_id if over and counts.completed else None,
        error_file_id=plan.error_file_id if over and counts.failed else None,
        created_at=plan.created_at,
        expires_at=plan.expires_at,
        request_counts=counts,
        usage=usage_of(number("input_tokens"), number("cached_tokens"), number("output_tokens")),
        metadata=plan.metadata,
        **times,
    )
