"""Jobs of one kind in Redis: each tenant's, those that are open, and who works on them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import redis.asyncio as redis

from services.common.jobs import scripts
from services.common.jobs.claim import Claim, LostClaimError
from services.common.keys import JobKeys, RedisKeys
from services.common.redis_client import Argument

T = TypeVar("T")
_MOST_KEPT = 1000  # per tenant
END = -1.0  # a lease that ends the job


class Run(Protocol):
    """Runs an operation on Redis."""

    def __call__(self, operation: Callable[[], Awaitable[T]]) -> Awaitable[T]:
        """Return the operation's result."""


class JobQueue:
    """The jobs of all tenants. All methods raise what `run` raises."""

    def __init__(self, client: redis.Redis, keys: JobKeys, run: Run, life_s: int, choice: str) -> None:
        """`life_s`: how long a job is kept after its end; `choice`: see :data:`scripts.CLAIM`."""
        self.keys = keys
        self._client, self._run, self._life_s = client, run, life_s
        self._create = client.register_script(scripts.CREATE)
        self._claim = client.register_script(scripts.NOW + choice + scripts.CLAIM)
        self._turn = client.register_script(scripts.TURN)

    async def create(self, member: str, fields: Mapping[str, Argument], most_open: int) -> bool:
        """Create a job; returns whether its tenant had fewer than `most_open` open ones."""
        tenant, job_id = RedisKeys.parts(member)
        where = [self.keys.index(tenant), self.keys.queue, self.keys.job(member)]
        args = [job_id, member, most_open, _MOST_KEPT, *flat(fields)]
        return bool(await self._run(lambda: self._create(keys=where, args=args)))

    async def ids(self, tenant: str) -> list[str]:
        """The ids of a tenant's jobs, the latest first; some may have expired."""
        key = self.keys.index(tenant)
        members: Any = await self._run(lambda: self._client.zrange(key, 0, -1))
        return sorted((member.decode() for member in members), reverse=True)

    async def fields(self, member: str) -> dict[str, bytes]:
        """The fields of a job; empty when it has expired."""
        key = self.keys.job(member)
        fields: Any = await self._run(lambda: self._client.hgetall(key))
        return {name.decode(): value for name, value in fields.items()}

    async def claim(self, owner: str, lease_s: float, *choice: Argument) -> Claim | None:
        """Claim a job that has no owner; `choice`: arguments of the script that chooses."""
        where, args = [self.keys.queue, self.keys.owners], [owner, str(lease_s), self.keys.jobs, *choice]
        member = await self._run(lambda: self._claim(keys=where, args=args))
        return None if member is None else Claim(member.decode(), owner)

    async def write(
        self,
        claim: Claim,
        turns: Mapping[str, str],
        fields: Mapping[str, Argument],
        lease_s: float | None = None,
        lists: Mapping[str, Sequence[str]] | None = None,
    ) -> str:
        """Write as the owner; returns the status.

        turns: each status in which `fields` are written, and the status after it.
        lease_s: renews the claim; 0 gives the job back, `END` ends it if its status turns, None leaves the lease.
        lists: what is appended to each list, by key, in any status.
        Raises LostClaimError.
        """
        where, args = self.turn_arguments(claim.member, claim.owner, turns, fields, lease_s, lists or {})
        answer: Any = await self._run(lambda: self._turn(keys=where, args=args))
        return status_of(answer)

    async def turn(
        self,
        member: str,
        turns: Mapping[str, str],
        fields: Mapping[str, Argument],
        lists: Mapping[str, Sequence[str]] | None = None,
        *,
        ends: bool = False,
    ) -> bool:
        """Write as a user, regardless of the job's owner, in a status of `turns`; returns whether it was written."""
        where, args = self.turn_arguments(member, "", turns, fields, END if ends else None, lists or {})
        answer: Any = await self._run(lambda: self._turn(keys=where, args=args))
        return answer is not None and bool(answer[0])

    def turn_arguments(
        self,
        member: str,
        owner: str,
        turns: Mapping[str, str],
        fields: Mapping[str, Argument],
        lease_s: float | None,
        lists: Mapping[str, Sequence[str]],
    ) -> tuple[list[str], list[Argument]]:
        """Keys and arguments of :data:`scripts.TURN`."""
        lease = "" if lease_s is None else str(lease_s)
        args: list[Argument] = [member, owner, lease, self._life_s, len(turns), *flat(turns)]
        for entries in lists.values():
            args += [len(entries), *entries]
        return [self.keys.queue, self.keys.owners, self.keys.job(member), *lists], [*args, *flat(fields)]


def flat(fields: Mapping[str, Argument] | Mapping[str, str]) -> list[Argument]:
    """Names and values in turn, as Redis takes them."""
    return [part for item in fields.items() for part in item]


def status_of(answer: list[Any] | None) -> str:
    """The status that :data:`scripts.TURN` returned to an owner; raises LostClaimError."""
    if answer is None:
        raise LostClaimError
    status: bytes = answer[1]
    return status.decode()
