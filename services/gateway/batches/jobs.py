"""Batches in Redis: their state, the gateway that works on them, and the lines that have been written."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import msgspec

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

_MOST_OPEN = 100  # per tenant
_MOST_KEPT = 1000  # per tenant
_NO_LIMIT = 1 << 62
LOST = b"lost"
_TIMES = (
    "in_progress_at", "finalizing_at", "completed_at", "failed_at", "expired_at", "cancelling_at", "cancelled_at",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Claim:
    """A job that this owner works on, until another owner claims it."""

    tenant: str  # as it appears in Redis keys
    batch_id: str
    owner: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result that is written for a line."""

    number: int
    kind: Literal["completed", "failed"]
    data: bytes
    tokens: tuple[int, int, int] = (0, 0, 0)  # input, cached input, output


class LostClaimError(Exception):
    """Another gateway has claimed the job."""


class JobStore:
    """The batches of all tenants. All methods raise :class:`RedisAwayError`."""

    def __init__(self, files: FileStore, lease_s: float) -> None:
        self.files = files
        self._guard = files.guard
        self._keys: RedisKeys = files.keys
        self._lease_s = lease_s
        client = self._guard.client
        self._create = client.register_script(scripts.CREATE)
        self._claim = client.register_script(scripts.CLAIM)
        self._renew = client.register_script(scripts.RENEW)
        self._advance = client.register_script(scripts.ADVANCE)
        self._record = client.register_script(scripts.RECORD)
        self._finish = client.register_script(scripts.FINISH)
        self._cancel = client.register_script(scripts.CANCEL)

    # --- for clients -----------------------------------------------------------------------------------------------

    async def create(self, tenant: str, plan: Plan) -> Batch:
        """Create a batch; raises :class:`ApiError` (429)."""
        keys, batch_id = self._keys, new_object_id("batch_")
        where = [keys.batches(tenant), keys.batch_queue, keys.batch(keys.member(tenant, batch_id))]
        fields: list[Argument] = [
            "plan",
            msgspec.json.encode(plan),
            "status",
            "validating",
            "expires_at",
            plan.expires_at,
        ]
        args: list[Argument] = [batch_id, keys.member(tenant, batch_id), _MOST_OPEN, _MOST_KEPT, *fields]
        if not await self._guard.run(lambda: self._create(keys=where, args=args)):
            message = f"At most {_MOST_OPEN} of your batches may be open at once."
            raise ApiError(429, message, "batches", code="too_many_batches", retry_after_s=60)
        return await self.get(tenant, batch_id)

    async def get(self, tenant: str, batch_id: str) -> Batch:
        """One batch; raises :class:`ApiError` (404)."""
        found = await self._fields(tenant, batch_id)
        if found is None:
            message = f"No batch found with id '{batch_id}'."
            raise ApiError(404, message, "invalid_request_error", "id", "batch_not_found")
        return _batch_of(batch_id, found)

    async def list(self, tenant: str, after: str, limit: int) -> tuple[list[Batch], bool]:
        """The latest batches, or those before `after`, and whether there are more."""
        client, key = self._guard.client, self._keys.batches(tenant)
        members: Any = await self._guard.run(lambda: client.zrange(key, 0, -1))
        ids = [member.decode() for member in members]
        earlier = sorted((one for one in ids if not after or one < after), reverse=True)
        batches: list[Batch] = []
        for batch_id in earlier:
            fields = await self._fields(tenant, batch_id)
            if fields is None:  # the batch has expired
                await self._guard.run(partial(client.zrem, key, batch_id))
                continue
            if len(batches) == limit:
                return batches, True
            batches.append(_batch_of(batch_id, fields))
        return batches, False

    async def cancel(self, tenant: str, batch_id: str) -> Batch:
        """Request the end of a batch; raises :class:`ApiError` (404, 400)."""
        keys, member = self._keys, self._keys.member(tenant, batch_id)
        args: list[Argument] = [member, int(time.time())]
        status = await self._guard.run(lambda: self._cancel(keys=[keys.batch(member), keys.batch_queue], args=args))
        batch = await self.get(tenant, batch_id)
        if status != b"cancelling":
            raise invalid(f"Cannot cancel a batch with status '{batch.status}'.", None, "batch_not_cancellable")
        return batch

    async def _fields(self, tenant: str, batch_id: str) -> dict[str, bytes] | None:
        client, key = self._guard.client, self._keys.batch(self._keys.member(tenant, batch_id))
        found: Any = await self._guard.run(lambda: client.hgetall(key))
        fields = {name.decode(): value for name, value in found.items()}
        return fields if "plan" in fields else None

    # --- for gateways ----------------------------------------------------------------------------------------------

    async def open_jobs(self) -> int:
        """The number of open batches of all tenants."""
        client, key = self._guard.client, self._keys.batch_queue
        return int(await self._guard.run(lambda: client.zcard(key)))

    async def claim(self, owner: str, *, room: bool) -> Claim | None:
        """Claim a job without an owner; without `room`, only a job that has to be ended."""
        keys = self._keys
        args: list[Argument] = [owner, str(self._lease_s), int(room), keys.batch("")]
        member = await self._guard.run(lambda: self._claim(keys=[keys.batch_queue, keys.batch_owners], args=args))
        return None if member is None else Claim(*keys.parts(member.decode()), owner)

    async def renew(self, claim: Claim, *, give_up: bool = False) -> Status:
        """Renew a claim, or give it up; returns the job's status. Raises :class:`LostClaimError`."""
        keys, member = self._keys, self._member(claim)
        where = [keys.batch_queue, keys.batch_owners, keys.batch(member)]
        args: list[Argument] = [member, claim.owner, "0" if give_up else str(self._lease_s)]
        return _status(await self._guard.run(lambda: self._renew(keys=where, args=args)))

    async def load(self, claim: Claim) -> tuple[Plan, Status]:
        """The job's plan and status; raises :class:`LostClaimError`."""
        fields = await self._fields(claim.tenant, claim.batch_id)
        if fields is None:
            raise LostClaimError
        return msgspec.json.decode(fields["plan"], type=Plan), _status(fields["status"])

    async def written(self, claim: Claim) -> bytes:
        """A bitmap of the lines that have been written; lines count from 1, so bit 0 is unused."""
        client, key = self._guard.client, self._keys.batch_done(self._member(claim))
        bits: Any = await self._guard.run(lambda: client.get(key))
        return bits or b""

    async def advance(self, claim: Claim, before: Status, after: Status, **fields: int) -> Status:
        """Change the status from `before` to `after`; returns the new status. Raises :class:`LostClaimError`."""
        keys, member = self._keys, self._member(claim)
        args: list[Argument] = [member, claim.owner, before, after, *_flat({f"{after}_at": int(time.time()), **fields})]
        where = [keys.batch_owners, keys.batch(member)]
        return _status(await self._guard.run(lambda: self._advance(keys=where, args=args)))

    async def record(
        self, claim: Claim, plan: Plan, outcomes: Sequence[Outcome], *, beyond_limits: bool = False
    ) -> Status | None:
        """Write lines that are not written yet; None: storage is full. Raises :class:`LostClaimError`."""
        keys, member, limits = self._keys, self._member(claim), self.files.limits
        where = [
            keys.batch_owners, keys.batch(member), keys.batch_done(member), keys.file_sizes, keys.file_usage,
            keys.file_ends, keys.file_pieces(claim.tenant, plan.output_file_id),
            keys.file_pieces(claim.tenant, plan.error_file_id),
        ]  # fmt: skip
        args: list[Argument] = [
            member, claim.owner, keys.usage_field(claim.tenant), _NO_LIMIT if beyond_limits else limits.tenant,
            _NO_LIMIT if beyond_limits else limits.total, plan.expires_at - plan.created_at + limits.life_s,
            keys.member(claim.tenant, plan.output_file_id), keys.member(claim.tenant, plan.error_file_id),
            *(outcomes[0].tokens if len(outcomes) == 1 else (0, 0, 0)),
            *(part for outcome in outcomes for part in (outcome.number, outcome.kind, outcome.data)),
        ]  # fmt: skip
        answer = await self._guard.run(lambda: self._record(keys=where, args=args))
        return None if answer == b"full" else _status(answer)

    async def finish(
        self, claim: Claim, plan: Plan, status: Status, errors: Sequence[BatchError] = (), **numbers: int
    ) -> None:
        """End a batch and publish its files. Raises :class:`LostClaimError`."""
        keys, member, now, life_s = self._keys, self._member(claim), int(time.time()), self.files.limits.life_s
        where = [
            keys.batch_owners, keys.batch(member), keys.batch_queue, keys.batch_done(member), keys.files(claim.tenant),
            keys.file_sizes, keys.file_ends,
        ]  # fmt: skip
        args: list[Argument] = [member, claim.owner, life_s]
        for file_id, kind in ((plan.output_file_id, "output"), (plan.error_file_id, "error")):
            args += [file_id, keys.member(claim.tenant, file_id), _file_head(claim, file_id, kind, now, life_s)]
        fields: dict[str, Argument] = {"status": status, f"{status}_at": now, **numbers}
        if errors:
            fields["errors"] = msgspec.json.encode(BatchErrors(data=list(errors)))
        args += _flat(fields)
        _status(await self._guard.run(lambda: self._finish(keys=where, args=args)))

    def _member(self, claim: Claim) -> str:
        return self._keys.member(claim.tenant, claim.batch_id)


def _flat(fields: Mapping[str, Argument]) -> list[Argument]:
    return [part for item in fields.items() for part in item]


def _status(answer: bytes) -> Status:
    if answer == LOST:
        raise LostClaimError
    return answer.decode()  # type: ignore[return-value]  # only a Status is ever written


def _file_head(claim: Claim, file_id: str, kind: str, now: int, life_s: int) -> bytes:
    """The JSON of a result file up to the size, which the script adds."""
    file = {
        "id": file_id, "object": "file", "created_at": now, "expires_at": now + life_s,
        "filename": f"{claim.batch_id}_{kind}.jsonl", "purpose": "batch_output", "status": "processed",
        "status_details": None,
    }  # fmt: skip
    return msgspec.json.encode(file)[:-1] + b',"bytes":'


def _batch_of(batch_id: str, fields: dict[str, bytes]) -> Batch:
    plan, status = msgspec.json.decode(fields["plan"], type=Plan), fields["status"].decode()

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
        status=status,  # type: ignore[arg-type]  # only a Status is ever written
        output_file_id=plan.output_file_id if over and counts.completed else None,
        error_file_id=plan.error_file_id if over and counts.failed else None,
        created_at=plan.created_at,
        expires_at=plan.expires_at,
        request_counts=counts,
        usage=usage_of(number("input_tokens"), number("cached_tokens"), number("output_tokens")),
        metadata=plan.metadata,
        **times,
    )
