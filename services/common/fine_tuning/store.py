"""Jobs in Redis: their state, their claims, their events and checkpoints."""

from __future__ import annotations

import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

import redis.asyncio as redis

from services.common.adapters import read_registered
from services.common.fine_tuning import scripts
from services.common.fine_tuning.records import Checkpoint, Event, JobError, Order, Presence, Result, Stage, Status
from services.common.keys import RedisKeys
from services.common.redis_client import Argument

T = TypeVar("T")
_MOST_OPEN = 20  # per tenant
_MOST_KEPT = 1000  # per tenant
_MOST_FAULTS = 3  # errors in our own code, before a job fails
_PRESENCE_S = 30  # a fine-tuner that has said nothing for so long is no longer there


class Run(Protocol):
    """Runs an operation on Redis."""

    def __call__(self, operation: Callable[[], Awaitable[T]]) -> Awaitable[T]:
        """Return the operation's result."""


class LostClaimError(Exception):
    """Another owner has claimed the job, or it was cancelled."""


@dataclass(frozen=True, slots=True)
class Job:
    """A job as it stands."""

    order: Order
    status: Status
    stage: Stage
    numbers: Mapping[str, int]  # times in seconds since the epoch, steps, tokens
    model: str = ""  # the name under which the result is served
    result_file: str = ""
    error: JobError | None = None
    result: Result | None = None
    heard: str = ""  # position in a training's messages; a fine-tuner that starts anew continues there
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Claim:
    """A job that this owner works on, until another owner claims it."""

    member: str  # tenant, as it appears in Redis keys, and id
    owner: str
    job: Job  # as it was when it was claimed


def new_id(prefix: str) -> str:
    """A random id that cannot be guessed; ids sort by time of creation."""
    return f"{prefix}{time.time_ns() // 1000:014x}{random.SystemRandom().getrandbits(40):010x}"


def new_event(message: str, level: str = "info", data: Mapping[str, Any] | None = None) -> Event:
    """An event of this moment; with `data`, metrics."""
    return Event(
        id=new_id("ftevent-"),
        created_at=int(time.time()),
        level=level,  # type: ignore[arg-type]  # pydantic checks it
        message=message,
        type="message" if data is None else "metrics",
        data=None if data is None else dict(data),
    )


class JobStore:
    """The jobs of all tenants. All methods raise what `run` raises."""

    def __init__(self, client: redis.Redis, keys: RedisKeys, run: Run, life_s: int) -> None:
        """`life_s`: how long a job is kept after its end."""
        self._client, self._keys, self._run, self._life_s = client, keys, run, life_s
        self._create = client.register_script(scripts.CREATE)
        self._claim = client.register_script(scripts.CLAIM)
        self._report = client.register_script(scripts.REPORT)
        self._turn = client.register_script(scripts.TURN)

    # --- for users -------------------------------------------------------------------------------------------------

    async def create(self, order: Order) -> bool:
        """Create a job; returns whether there was room."""
        keys, member = self._keys, self._keys.member(order.tenant, order.id)
        where = [keys.tuning_jobs(order.tenant), keys.tuning_queue, keys.tuning_job(member)]
        fields: list[Argument] = ["order", order.model_dump_json(), "status", "validating_files", "stage", "check"]
        args: list[Argument] = [order.id, member, _MOST_OPEN, _MOST_KEPT, *fields]
        return bool(await self._run(lambda: self._create(keys=where, args=args)))

    async def get(self, tenant: str, job_id: str) -> Job | None:
        """One job."""
        return await self.load(self._keys.member(tenant, job_id))

    async def ids(self, tenant: str) -> list[str]:
        """The ids of a tenant's jobs, the latest first; some may have expired."""
        key = self._keys.tuning_jobs(tenant)
        members: Any = await self._run(lambda: self._client.zrange(key, 0, -1))
        return sorted((member.decode() for member in members), reverse=True)

    async def turn(self, tenant: str, job_id: str, status: Status, allowed: Sequence[Status]) -> bool:
        """Set the status if it is one of `allowed`; returns whether it was."""
        keys, member = self._keys, self._keys.member(tenant, job_id)
        where = [
            keys.tuning_job(member), keys.tuning_queue, keys.tuning_owners, keys.tuning_events(member),
            keys.tuning_checkpoints(member),
        ]  # fmt: skip
        said = {"cancelled": "The job was cancelled.", "paused": "The job was paused.", "queued": "The job goes on."}
        args: list[Argument] = [member, status, new_event(said[status]).model_dump_json(), self._life_s, *allowed]
        return bool(await self._run(lambda: self._turn(keys=where, args=args)))

    async def events(self, tenant: str, job_id: str) -> list[Event]:
        """A job's events, the oldest first."""
        key = self._keys.tuning_events(self._keys.member(tenant, job_id))
        found: Any = await self._run(lambda: self._client.lrange(key, 0, -1))
        return [Event.model_validate_json(text) for text in found]

    async def checkpoints(self, tenant: str, job_id: str) -> list[Checkpoint]:
        """A job's checkpoints, the oldest first."""
        key = self._keys.tuning_checkpoints(self._keys.member(tenant, job_id))
        found: Any = await self._run(lambda: self._client.lrange(key, 0, -1))
        return [Checkpoint.model_validate_json(text) for text in found]

    # --- for gateways and fine-tuners --------------------------------------------------------------------------------

    async def load(self, member: str) -> Job | None:
        """One job."""
        found: Any = await self._run(lambda: self._client.hgetall(self._keys.tuning_job(member)))
        fields = {name.decode(): value for name, value in found.items()}
        return _job_of(fields) if "order" in fields else None

    async def claim(self, owner: str, lease_s: float, stages: Sequence[Stage]) -> Claim | None:
        """Claim a job that has no owner, with one of the stages."""
        keys = self._keys
        args: list[Argument] = [owner, str(lease_s), keys.tuning_job(""), *stages]
        found = await self._run(lambda: self._claim(keys=[keys.tuning_queue, keys.tuning_owners], args=args))
        if found is None:
            return None
        job = await self.load(found.decode())
        return Claim(found.decode(), owner, job) if job else None

    async def report(
        self,
        claim: Claim,
        lease_s: float,
        events: Sequence[Event] = (),
        checkpoints: Sequence[Checkpoint] = (),
        fields: Mapping[str, Argument] | None = None,
    ) -> Status:
        """Renew the claim (`lease_s` 0: give the job back), and write; returns the status.

        Fields are not written when the status is no longer one in which work goes on. Raises LostClaimError.
        """
        keys, member = self._keys, claim.member
        where = [
            keys.tuning_owners, keys.tuning_job(member), keys.tuning_queue, keys.tuning_events(member),
            keys.tuning_checkpoints(member),
        ]  # fmt: skip
        records = [record.model_dump_json() for record in (*events, *checkpoints)]
        args: list[Argument] = [
            member, claim.owner, str(lease_s), self._life_s, len(events), len(checkpoints), *records,
            *(part for item in (fields or {}).items() for part in item),
        ]  # fmt: skip
        found = await self._run(lambda: self._report(keys=where, args=args))
        if found == b"lost":
            raise LostClaimError
        status: Status = found.decode()
        return status

    async def end(self, claim: Claim, status: Status, events: Sequence[Event], fields: Mapping[str, Argument]) -> None:
        """End a job. Raises LostClaimError."""
        await self.report(claim, -1, events, fields={"status": status, "finished_at": int(time.time()), **fields})

    async def fault(self, claim: Claim, error: Exception, lease_s: float) -> None:
        """Count an error in our own code: the job is tried again after the lease, and fails with the third one.

        Raises LostClaimError.
        """
        faults = 1 + claim.job.numbers.get("faults", 0)
        message = f"Internal error in the stage `{claim.job.stage}`: {type(error).__name__}: {error}"
        if faults < _MOST_FAULTS:
            await self.report(claim, lease_s, [new_event(message, "warn")], fields={"faults": faults})
            return
        failure = JobError(code="internal_error", message=f"{message} ({faults} times)")
        await self.end(claim, "failed", [new_event(failure.message, "error")], {"error": failure.model_dump_json()})

    async def served_folders(self) -> frozenset[str]:
        """The folders of all adapters that were loaded while the installation ran."""
        found: Any = await self._run(lambda: self._client.hgetall(self._keys.adapters))
        return frozenset(adapter.source for adapter in read_registered(found).values())

    async def appear(self, owner: str, presence: Presence) -> None:
        """Say that a fine-tuner is there; to be said again every few seconds."""
        text = presence.model_copy(update={"seen_at": await self._now()}).model_dump_json()
        await self._run(lambda: self._client.hset(self._keys.tuners, owner, text))

    async def leave(self, owner: str) -> None:
        """Say that a fine-tuner ends."""
        await self._run(lambda: self._client.hdel(self._keys.tuners, owner))

    async def present(self) -> list[Presence]:
        """The fine-tuners that are there."""
        found: Any = await self._run(lambda: self._client.hgetall(self._keys.tuners))
        said, now = {owner: Presence.model_validate_json(text) for owner, text in found.items()}, await self._now()
        for owner in [owner for owner, one in said.items() if one.seen_at < now - _PRESENCE_S]:
            del said[owner]
            await self._run(partial(self._client.hdel, self._keys.tuners, owner))
        return list(said.values())

    async def _now(self) -> int:
        """Seconds since the epoch, by Redis's clock."""
        found: Any = await self._run(self._client.time)
        return int(found[0])

    async def file(self, tenant: str, file_id: str) -> bytes:
        """The content of a file; empty when it is gone."""
        key = self._keys.file_pieces(tenant, file_id)
        found: Any = await self._run(lambda: self._client.lrange(key, 0, -1))
        return b"".join(found)


def _job_of(fields: Mapping[str, bytes]) -> Job:
    names = ("started_at", "finished_at", "estimated_finish", "trained_tokens", "step", "steps", "faults")
    metrics = {name: float(fields[name]) for name in ("train_loss", "valid_loss", "served_loss") if name in fields}
    return Job(
        order=Order.model_validate_json(fields["order"]),
        status=fields["status"].decode(),  # type: ignore[arg-type]  # only a Status is ever written
        stage=fields["stage"].decode(),  # type: ignore[arg-type]  # only a Stage is ever written
        numbers={name: int(fields[name]) for name in names if name in fields},
        model=fields.get("model", b"").decode(),
        result_file=fields.get("result_file", b"").decode(),
        error=JobError.model_validate_json(fields["error"]) if "error" in fields else None,
        result=Result.model_validate_json(fields["result"]) if "result" in fields else None,
        heard=fields.get("heard", b"").decode(),
        metrics=metrics,
    )
