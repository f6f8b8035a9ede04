"""Worker leases in Redis: workers write theirs every second, routers and the coordinator read them all.

Whether a lease is alive is told by Redis's clock alone: machines' clocks differ. Reading a thousand leases holds Redis
up for milliseconds, with everybody's sessions behind them; so a reader says which state it has seen, and gets nothing
when no lease has come, changed or ended since.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncGenerator, Callable
from dataclasses import asdict, dataclass

import redis.asyncio as redis
from redis.exceptions import NoPermissionError, RedisError

from services.common.keys import RedisKeys
from services.common.redis_client import RedisAccess
from services.common.redis_outage import RedisOutage
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


# Keys: times of the last beats, leases, version. A lease that is new, changed or back is a new version; with it go
# those that ended long ago. Versions start at the clock: a Redis that restarts empty does not repeat them.
_WRITE = """
local clock = redis.call('TIME')
local now, id, lease = clock[1] + clock[2] / 1e6, ARGV[1], ARGV[2]
local last = redis.call('ZSCORE', KEYS[1], id)
redis.call('ZADD', KEYS[1], string.format('%.6f', now), id)
if last and now - last <= tonumber(ARGV[3]) and redis.call('HGET', KEYS[2], id) == lease then return end
for _, gone in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now - ARGV[4])) do
  redis.call('ZREM', KEYS[1], gone)
  redis.call('HDEL', KEYS[2], gone)
end
redis.call('HSET', KEYS[2], id, lease)
redis.call('SET', KEYS[3], clock[1], 'NX')
redis.call('INCR', KEYS[3])
redis.call('PUBLISH', ARGV[5], id)
"""

_REMOVE = """
redis.call('ZREM', KEYS[1], ARGV[1])
redis.call('HDEL', KEYS[2], ARGV[1])
redis.call('INCR', KEYS[3])
redis.call('PUBLISH', ARGV[2], ARGV[1])
"""

# The state, and the leases unless that state has been seen. They come as one string instead of a thousand replies: the
# client parses a long reply slowly.
_READ = """
local clock = redis.call('TIME')
local alive = string.format('(%.6f', clock[1] + clock[2] / 1e6 - ARGV[1])
local state = (redis.call('GET', KEYS[3]) or '') .. ':' .. redis.call('ZCOUNT', KEYS[1], alive, '+inf')
if state == ARGV[2] then return {state} end
local ids, found = redis.call('ZRANGEBYSCORE', KEYS[1], alive, '+inf'), {}
for first = 1, #ids, 1000 do
  local last = math.min(first + 999, #ids)
  for _, lease in ipairs(redis.call('HMGET', KEYS[2], unpack(ids, first, last))) do
    if lease then found[#found + 1] = lease end
  end
end
return {state, table.concat(found, '\\n')}
"""


class LeaseTable:
    """The leases of one installation. All methods raise RedisError or OSError when Redis is away."""

    def __init__(self, client: redis.Redis, keys: RedisKeys) -> None:
        self._keys = [keys.workers, keys.leases, keys.leases_version]
        self._events = keys.worker_events
        self._write, self._remove, self._read = (client.register_script(text) for text in (_WRITE, _REMOVE, _READ))

    async def write(self, lease: Lease, client: redis.Redis | None = None) -> None:
        """Prolong a lease; `client` may be a pipeline."""
        await self._write(
            keys=self._keys,
            args=[lease.worker_id, lease.to_json(), LEASE_TTL_S, FORGET_S, self._events],
            client=client,
        )

    async def remove(self, worker_id: str) -> None:
        """Give a lease up."""
        await self._remove(keys=self._keys, args=[worker_id, self._events])

    async def read(self, seen: bytes) -> tuple[bytes, list[bytes] | None]:
        """The state of the table, and the live leases as JSON; None when the state is `seen`."""
        async with asyncio.timeout(READ_TIMEOUT_S):
            state, *leases = await self._read(keys=self._keys, args=[LEASE_TTL_S, seen])
        if not leases:
            return state, None
        return state, leases[0].split(b"\n") if leases[0] else []


class LeaseKeeper:
    """Keeps one worker's lease alive. Redis being away is logged and never stops the worker."""

    def __init__(self, client: redis.Redis, keys: RedisKeys, access: RedisAccess, current: Callable[[], Lease]) -> None:
        self.written = asyncio.Event()  # the lease, at least once
        self._table = LeaseTable(client, keys)
        self._current = current
        self._outage = RedisOutage(log, access, "lease not renewed")

    @property
    def waits_for(self) -> str:
        """Why nobody can find the worker yet; empty once the lease was written, whatever Redis does later."""
        return "" if self.written.is_set() else f"the lease is not written: {self._outage.why or 'asking Redis'}"

    async def run(self) -> None:
        """Beat until cancelled, then give the lease up."""
        written = ""
        try:
            while True:
                lease = self._current()
                if await self._beat(lease):
                    written = lease.worker_id
                await asyncio.sleep(BEAT_S)
        finally:
            if written:
                with contextlib.suppress(RedisError, OSError):  # the lease expires by itself
                    await self._table.remove(written)

    async def _beat(self, lease: Lease) -> bool:
        try:
            await self._table.write(lease)
        except (RedisError, OSError) as error:
            self._outage.failed(error)
            return False
        self._outage.ended()
        self.written.set()
        return True


def _parse(text: bytes) -> Lease | None:
    try:
        return Lease.from_json(text)
    except ValueError as error:
        log.warning("lease ignored: %s", error)
        return None


class LeaseWatcher:
    """Reads all live leases: at once when one changes, and every `BEAT_S` in any case."""

    def __init__(self, client: redis.Redis, keys: RedisKeys, access: RedisAccess) -> None:
        self._redis = client
        self._outage = RedisOutage(log, access, "leases not read")
        self._deaf = RedisOutage(log, access, "changes of leases are noticed late")
        self._events = keys.worker_events
        self._table = LeaseTable(client, keys)
        self._seen = b""
        self._parsed: dict[bytes, Lease | None] = {}  # what the last answer was made of; most of it is in the next
        self._leases: dict[str, Lease] = {}

    @property
    def trouble(self) -> str:
        """Why the last reading failed; empty when it did not, or there was none yet."""
        return self._outage.why

    async def read(self) -> dict[str, Lease]:
        """Leases by worker id; raises RedisError or OSError when Redis is away."""
        self._seen, lines = await self._table.read(self._seen)
        if lines is not None:
            self._parsed = {line: self._parsed[line] if line in self._parsed else _parse(line) for line in lines}
            self._leases = {lease.worker_id: lease for lease in self._parsed.values() if lease is not None}
        return self._leases

    async def watch(self) -> AsyncGenerator[dict[str, Lease] | None]:
        """Yield the live leases again and again; None while Redis is away (keep what you have)."""
        changed = asyncio.Event()
        listener = asyncio.create_task(self._listen(changed))
        try:
            while True:
                leases: dict[str, Lease] | None = None
                try:
                    leases = await self.read()
                    self._outage.ended()
                except (RedisError, OSError) as error:
                    self._outage.failed(error)
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
                    await pubsub.subscribe(self._events)
                    self._deaf.ended()
                    async for message in pubsub.listen():
                        if message["type"] == "message":
                            changed.set()
            except (RedisError, OSError) as error:
                if isinstance(error, NoPermissionError):  # all else hits the reader, too
                    self._deaf.failed(error)
                await asyncio.sleep(BEAT_S)
