"""Worker leases in Redis: workers write theirs every second, routers and the coordinator read them all."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import asdict, dataclass

import redis.asyncio as redis
from redis.exceptions import RedisError

from services.common.keys import RedisKeys
from services.common.tasks import end_tasks

BEAT_S = 1.0
LEASE_TTL_S = 5.0
READ_TIMEOUT_S = 1.0
# A fleet that starts at once is read a few times, not once for each worker.
MERGE_S = 0.02
# Ids of workers that died without giving their lease up are swept from the sorted set after this long.
FORGET_S = 600.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Lease:
    """What a worker says of itself. `incarnation` changes with every process start."""

    worker_id: str
    incarnation: str
    address: str  # host:port of its gRPC server
    model: str
    phase: str
    capabilities: tuple[str, ...] = ()

    def to_json(self) -> str:
        """The value stored in Redis."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str | bytes) -> Lease:
        """Read a stored value; raises ValueError when it is not a lease."""
        try:
            fields = json.loads(text)
            return Lease(**{**fields, "capabilities": tuple(fields["capabilities"])})
        except (TypeError, KeyError) as error:
            raise ValueError(f"not a worker lease: {error}") from error


class LeaseKeeper:
    """Keeps one worker's lease alive. Redis being away is logged once and never stops the worker."""

    def __init__(self, client: redis.Redis, keys: RedisKeys, current: Callable[[], Lease]) -> None:
        self._redis = client
        self._keys = keys
        self._current = current
        self._reachable = True

    async def run(self) -> None:
        """Beat until cancelled, then give the lease up."""
        announced: Lease | None = None
        try:
            while True:
                lease = self._current()
                if await self._beat(lease, announce=lease != announced):
                    announced = lease
                await asyncio.sleep(BEAT_S)
        finally:
            if announced is not None:
                await self._give_up(announced)

    async def _beat(self, lease: Lease, *, announce: bool) -> bool:
        try:
            async with self._redis.pipeline(transaction=True) as pipe:
                pipe.set(self._keys.worker(lease.worker_id), lease.to_json(), px=int(LEASE_TTL_S * 1000))
                pipe.zadd(self._keys.workers, {lease.worker_id: time.time()})
                pipe.zremrangebyscore(self._keys.workers, "-inf", time.time() - FORGET_S)
                if announce:
                    pipe.publish(self._keys.worker_events, lease.worker_id)
                await pipe.execute()
        except (RedisError, OSError) as error:
            if self._reachable:
                log.warning("lease not renewed, Redis is away: %s", error)
            self._reachable = False
            return False
        if not self._reachable:
            log.info("Redis is back, lease renewed")
        self._reachable = True
        return True

    async def _give_up(self, lease: Lease) -> None:
        with contextlib.suppress(RedisError, OSError):  # the lease expires by itself
            async with self._redis.pipeline(transaction=True) as pipe:
                pipe.delete(self._keys.worker(lease.worker_id))
                pipe.zrem(self._keys.workers, lease.worker_id)
                pipe.publish(self._keys.worker_events, lease.worker_id)
                await pipe.execute()


# One string instead of a thousand replies: the client parses a long reply slowly, and leases rarely change.
_READ_LEASES = """
local found = {}
for _, id in ipairs(redis.call('ZRANGE', KEYS[1], 0, -1)) do
  local lease = redis.call('GET', ARGV[1] .. id)
  if lease then found[#found + 1] = lease end
end
return table.concat(found, '\\n')
"""


def _parse(text: bytes) -> Lease | None:
    try:
        return Lease.from_json(text)
    except ValueError as error:
        log.warning("lease ignored: %s", error)
        return None


class LeaseWatcher:
    """Reads all live leases: at once when one changes, and every `BEAT_S` in any case."""

    def __init__(self, client: redis.Redis, keys: RedisKeys) -> None:
        self._redis = client
        self._keys = keys
        self._read = client.register_script(_READ_LEASES)
        self._parsed: dict[bytes, Lease | None] = {}  # what the last answer was made of; most of it is in the next

    async def read(self) -> dict[str, Lease]:
        """Leases by worker id; raises RedisError or OSError when Redis is away.

        The sorted set only says which keys to ask for. Whether a lease is alive is for its TTL to say: machines'
        clocks differ, Redis's own does not.
        """
        async with asyncio.timeout(READ_TIMEOUT_S):
            answer = await self._read(keys=[self._keys.workers], args=[self._keys.worker("")])
        lines = answer.split(b"\n") if answer else []
        self._parsed = {line: self._parsed[line] if line in self._parsed else _parse(line) for line in lines}
        return {lease.worker_id: lease for lease in self._parsed.values() if lease is not None}

    async def watch(self) -> AsyncGenerator[dict[str, Lease] | None]:
        """Yield the live leases again and again; None while Redis is away (keep what you have)."""
        changed = asyncio.Event()
        listener = asyncio.create_task(self._listen(changed))
        reachable = True
        try:
            while True:
                try:
                    leases = await self.read()
                except (RedisError, OSError) as error:
                    if reachable:
                        log.warning("leases not read, Redis is away: %s", error)
                    reachable, leases = False, None
                else:
                    if not reachable:
                        log.info("Redis is back, leases read")
                    reachable = True
                yield leases
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(BEAT_S):
                        await changed.wait()
                    await asyncio.sleep(MERGE_S)
                changed.clear()
        finally:
            await end_tasks([listener])

    async def _listen(self, changed: asyncio.Event) -> None:
        while True:
            try:
                async with self._redis.pubsub() as pubsub:
                    await pubsub.subscribe(self._keys.worker_events)
                    async for message in pubsub.listen():
                        if message["type"] == "message":
                            changed.set()
            except (RedisError, OSError):
                await asyncio.sleep(BEAT_S)
