"""Jobs in Redis: their state, their claims, their events and checkpoints."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import redis.asyncio as redis

from services.common.adapters import read_registered
from services.common.fine_tuning.records import Event, JobCheckpoint, JobError, Order, Presence, Result, Stage, Status
from services.common.jobs.claim import Claim
from services.common.jobs.queue import END, JobQueue, Run
from services.common.keys import RedisKeys
from services.common.redis_client import Argument

_MOST_OPEN = 20  # per tenant
_MOST_FAULTS = 3  # errors in our own code, before a job fails
_PRESENCE_S = 30  # a fine-tuner that has said nothing for so long is no longer there
# How jobs are claimed: the one that has waited longest goes first. Arguments: stages.
_CHOICE = """
local function place(job, status)
  local stage = redis.call('HGET', job, 'stage')
  for i = 4, #ARGV do
    if ARGV[i] == stage and status ~= 'paused' then return 'first' end
  end
end
local function take(job)
  if redis.call('HGET', job, 'stage') ~= 'train' then return end
  redis.call('HSET', job, 'status', 'running')
  redis.call('HSETNX', job, 'started_at', math.floor(now()))
end
"""


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
class TuningClaim(Claim):
    """A claim of a fine-tuning job."""

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


class TuningStore:
    """The fine-tuning jobs of all tenants. All methods raise what `run` raises."""

    def __init__(self, client: redis.Redis, keys: RedisKeys, run: Run, life_s: int) -> None:
        """`life_s`: how long a job is kept after its end."""
        self._client, self._keys, self._run = client, keys, run
        self._queue = JobQueue(client, keys.tuning_jobs, run, life_s, _CHOICE)

    # --- for users -------------------------------------------------------------------------------------------------

    async def create(self, order: Order) -> bool:
        """Create a job; returns whether there was room."""
        fields: dict[str, Argument] = {"order": order.model_dump_json(), "status": "validating_files", "stage": "check"}
        return await self._queue.create(self._keys.member(order.tenant, order.id), fields, _MOST_OPEN)

    async def get(self, tenant: str, job_id: str) -> Job | None:
        """One job."""
        return await self.load(self._keys.member(tenant, job_id))

    async def ids(self, tenant: str) -> list[str]:
        """The ids of a tenant's jobs, the latest first; some may have expired."""
        return await self._queue.ids(tenant)

    async def turn(self, tenant: str, job_id: str, status: Status, allowed: Sequence[Status]) -> bool:
        """Set the status if it is one of `allowed`; returns whether it was."""
        member, ends = self._keys.member(tenant, job_id), status == "cancelled"
        messages = {
            "cancelled": "The job was cancelled.", "paused": "The job was paused.", "queued": "The job goes on.",
        }  # fmt: skip
        fields: dict[str, Argument] = {"finished_at": int(time.time())} if ends else {}
        lists = self._lists(member, [new_event(messages[status])], ())
        return await self._queue.turn(member, dict.fromkeys(allowed, status), fields, lists, ends=ends)

    async def events(self, tenant: str, job_id: str) -> list[Event]:
        """A job's events, the oldest first."""
        key = self._keys.tuning_events(self._keys.member(tenant, job_id))
        texts: Any = await self._run(lambda: self._client.lrange(key, 0, -1))
        return [Event.model_validate_json(text) for text in texts]

    async def checkpoints(self, tenant: str, job_id: str) -> list[JobCheckpoint]:
        """A job's checkpoints, the oldest first."""
        key = self._keys.tuning_checkpoints(self._keys.member(tenant, job_id))
        texts: Any = await self._run(lambda: self._client.lrange(key, 0, -1))
        return [JobCheckpoint.model_validate_json(text) for text in texts]

    # --- for gateways and fine-tuners --------------------------------------------------------------------------------

    async def load(self, member: str) -> Job | None:
        """One job."""
        fields = await self._queue.fields(member)
        return _job_of(fields) if "order" in fields else None

    async def claim(self, owner: str, lease_s: float, stages: Sequence[Stage]) -> TuningClaim | None:
        """Claim a job that has no owner, with one of the stages."""
        claim = await self._queue.claim(owner, lease_s, *stages)
        job = await self.load(claim.member) if claim else None
        return TuningClaim(claim.member, owner, job) if claim and job else None

    async def report(
        self,
        claim: Claim,
        lease_s: float,
        events: Sequence[Event] = (),
        checkpoints: Sequence[JobCheckpoint] = (),
        fields: Mapping[str, Argument] | None = None,
    ) -> Status:
        """Renew the claim (`lease_s` 0: give the job back), and write; returns the status.

        Fields are not written when the status is no longer one in which work goes on. Raises LostClaimError.
        """
        turns = {"running": "running", "validating_files": "validating_files"}
        turns["queued"] = "running" if lease_s else "queued"  # paused and resumed between two reports
        lists = self._lists(claim.member, events, checkpoints)
        status = await self._queue.write(claim, turns, fields or {}, lease_s, lists)
        return cast("Status", status)  # no other one is ever written

    def _lists(
        self, member: str, events: Sequence[Event], checkpoints: Sequence[JobCheckpoint]
    ) -> dict[str, list[str]]:
        """The events and checkpoints to append, by the key of the job's list; the lists expire with the job."""
        return {
            self._keys.tuning_events(member): [event.model_dump_json() for event in events],
            self._keys.tuning_checkpoints(member): [checkpoint.model_dump_json() for checkpoint in checkpoints],
        }

    async def end(self, claim: Claim, status: Status, events: Sequence[Event], fields: Mapping[str, Argument]) -> None:
        """End a job. Raises LostClaimError."""
        await self.report(claim, END, events, fields={"status": status, "finished_at": int(time.time()), **fields})

    async def fault(self, claim: TuningClaim, error: Exception, lease_s: float) -> None:
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
        entries: Any = await self._run(lambda: self._client.hgetall(self._keys.adapters))
        return frozenset(adapter.source for adapter in read_registered(entries).values())

    async def appear(self, owner: str, presence: Presence) -> None:
        """Say that a fine-tuner is there; to be said again every few seconds."""
        text = presence.model_copy(update={"seen_at": await self._now()}).model_dump_json()
        await self._run(lambda: self._client.hset(self._keys.tuners, owner, text))

    async def leave(self, owner: str) -> None:
        """Say that a fine-tuner ends."""
        await self._run(lambda: self._client.hdel(self._keys.tuners, owner))

    async def present(self) -> list[Presence]:
        """The fine-tuners that are there."""
        texts: Any = await self._run(lambda: self._client.hgetall(self._keys.tuners))
        tuners, now = {owner: Presence.model_validate_json(text) for owner, text in texts.items()}, await self._now()
        for owner in [owner for owner, one in tuners.items() if one.seen_at < now - _PRESENCE_S]:
            del tuners[owner]
            await self._run(partial(self._client.hdel, self._keys.tuners, owner))
        return list(tuners.values())

    async def _now(self) -> int:
        """Seconds since the epoch, by Redis's clock."""
        time: Any = await self._run(self._client.time)
        return int(time[0])

    async def file(self, tenant: str, file_id: str) -> bytes:
        """The content of a file; empty when it is gone."""
        key = self._keys.file_pieces(tenant, file_id)
        pieces: Any = await self._run(lambda: self._client.lrange(key, 0, -1))
        return b"".join(pieces)


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
