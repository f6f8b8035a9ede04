"""Worker leases in Redis: each worker writes its own every second, routers and the coordinator read them all.

Only Redis's clock decides whether a lease is alive, since machines' clocks differ. Reading a thousand leases blocks
Redis, and all session commands, for milliseconds. So a reader sends the state that it has seen, and gets no leases if
none has come, changed or ended since.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncGenerator, Callable
from dataclasses import asdict, dataclass, fields

import redis.asyncio as redis
from redis.exceptions import NoPermissionError, RedisError

from services.common.keys import RedisKeys
from services.common.redis_client import RedisAccess
from services.common.redis_outage import RedisOutage
from services.common.tasks import end_tasks

BEAT_S = 1.0
LEASE_TTL_S = 5.0
READ_TIMEOUT_S = 1.0
# Pause after a change, so that a fleet that starts together causes a few reads, not one per worker.
MERGE_S = 0.02
# Workers that died without giving their lease up are removed from the sorted set after this time.
FORGET_S = 600.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Lease:
    """A worker's description of itself. `incarnation` changes with every start of its process."""

    worker_id: str
    incarnation: str
    address: str  # host:port of its gRPC server
    model: str
    phase: str

    def to_json(self) -> str:
        """The value stored in Redis."""
        # Readers of the revision before require `capabilities`, while an installation is upgraded.
        return json.dumps(asdict(self) | {"capabilities": []})

    @staticmethod
    def from_json(text: str | bytes) -> Lease:
        """Read a stored value, whose writer may know more fields; raises ValueError when it is not a lease."""
        try:
            stored = json.loads(text)
            return Lease(**{field.name: stored[field.name] for field in fields(Lease)})
        except (TypeError, KeyError) as error:
            raise ValueError(f"not a worker lease: {error}") from error


# Keys: times of the last beats, leases, version. A lease that is new, changed or renewed after its end makes a new
# version; the same call removes leases that ended long ago. Versions start at the clock, so that a Redis that restarts
# empty does not repeat them.
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

# Returns the state, and the leases unless the reader has seen that state. The leases are one string instead of a
# thousand replies, which the client would parse slowly. The keys are ARGV[3] to ARGV[5]: a script's declared keys need
# the right to write them, which readers do not have.
_READ = """
local clock = redis.call('TIME')
local alive = string.format('(%.6f', clock[1] + clock[2] / 1e6 - ARGV[1])
local state = (redis.call('GET', ARGV[5]) or '') .. ':' .. redis.call('ZCOUNT', ARGV[3], alive, '+inf')
if state == ARGV[2] then return {state} end
local ids, found = redis.call('ZRANGEBYSCORE', ARGV[3], alive, '+inf'), {}
for first = 1, #ids, 1000 do
  local last = math.min(first + 999, #ids)
  for _, lease in ipairs(redis.call('HMGET', ARGV[4], unpack(ids, first, last))) do
    if lease then found[#found + 1] = lease end
  end
end
return {state, table.concat(found, '\\n')}
"""


class LeaseTable:
    """The leases of one installation. All methods raise RedisError or OSError if Redis is away."""

    def __init__(self, client: redis.Redis, keys: RedisKeys) -> None:
        self._keys = [keys.workers, keys.leases, keys.leases_version]
        self._events = keys.worker_events
        self._write, self._remove, self._read = (client.register_script(text) for text in (_WRITE, _REMOVE, _READ))

    async def write(self, lease: Lease, client: redis.Redis | None = None) -> None:
        """Renew a lease; `client` may be a pipeline."""
        await self._write(
            keys=self._keys,
            args=[lease.worker_id, lease.to_json(), LEASE_TTL_S, FORGET_S, self._events],
            client=client,
        )

    async def remove(self, worker_id: str) -> None:
        """Give a lease up."""
        await self._remove(keys=self._keys, args=[worker_id, self._events])

    async def read(self, seen: bytes) -> tuple[bytes, list[bytes] | None]:
        """The state of the table, and the live leases as JSON; None instead of leases if the state is `seen`."""
        async with asyncio.timeout(READ_TIMEOUT_S):
            state, *leases = await self._read(args=[LEASE_TTL_S, seen, *self._keys])
        if not leases:
            return state, None
        return state, leases[0].split(b"\n") if leases[0] else []


class LeaseKeeper:
    """Keeps one worker's lease alive. An outage of Redis is logged and never stops the worker."""

    def __init__(self, client: redis.Redis, keys: RedisKeys, access: RedisAccess, current: Callable[[], Lease]) -> None:
        self.written = asyncio.Event()  # set once the lease has been written
        self._table = LeaseTable(client, keys)
        self._current = current
        self._outage = RedisOutage(log, access, "lease not renewed")

    @property
    def waits_for(self) -> str:
        """Why routers cannot find the worker yet; empty from the first write of the lease on."""
        return "" if self.written.is_set() else f"the lease is not written: {self._outage.why or 'asking Redis'}"

    async def run(self) -> None:
        """Renew the lease until cancelled, then give it up."""
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
    """Reads all live leases: soon after a change, and at least every `BEAT_S`."""

    def __init__(self, client: redis.Redis, keys: RedisKeys, access: RedisAccess) -> None:
        self._redis = client
        self._outage = RedisOutage(log, access, "leases not read")
        self._deaf = RedisOutage(log, access, "changes of leases are noticed late")
        self._events = keys.worker_events
        self._table = LeaseTable(client, keys)
        self._seen = b""
        self._parsed: dict[bytes, Lease | None] = {}  # the last answer's lines; most recur in the next one
        self._leases: dict[str, Lease] = {}

    @property
    def trouble(self) -> str:
        """Why the last read failed; empty if it succeeded or there was none yet."""
        return self._outage.why

    async def read(self) -> dict[str, Lease]:
        """Leases by worker id; raises RedisError or OSError if Redis is away."""
        self._seen, lines = await self._table.read(self._seen)
        if lines is not None:
            self._parsed = {line: self._parsed[line] if line in self._parsed else _parse(line) for line in lines}
            self._leases = {lease.worker_id: lease for lease in self._parsed.values() if lease is not None}
        return self._leases

    async def watch(self) -> AsyncGenerator[dict[str, Lease] | None]:
        """Yield the live leases after each read; None while Redis is away: callers then keep what they have."""
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
                if isinstance(error, NoPermissionError):  # the reader logs all other errors
                    self._deaf.failed(error)
                await asyncio.sleep(BEAT_S)
