"""Bindings of sessions to workers: one key per session in Redis, written by compare-and-set.

Gateways ask the same router about a session, so the router remembers what it has read and written: the turns of a
session that stays cost no call to Redis (docs/adr/037-a-router-remembers-its-sessions.md).
"""

from __future__ import annotations

import json
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import redis.asyncio as redis
from redis.exceptions import RedisError

from services.common.keys import RedisKeys
from services.common.redis_client import Argument, Batcher, RedisAccess
from services.common.redis_outage import RedisOutage
from services.router.breaker import DEPENDENCY, Breaker

# A binding that a router remembers for longer is read again: gateways may have asked another router meanwhile.
REMEMBERED_S = 5 * 60
MAX_REMEMBERED = 50_000
# In Redis a binding lives for 30 minutes after the last turn, of which Redis hears up to REMEMBERED_S later.
SESSION_TTL_S = 30 * 60 + REMEMBERED_S
log = logging.getLogger(__name__)

# Sets KEYS[1] to ARGV[2] if it holds ARGV[1] or nothing; returns the other value that it holds, or nil.
_COMPARE_AND_SET = """
local held = redis.call('GET', KEYS[1])
if held and held ~= ARGV[1] then return held end
redis.call('SET', KEYS[1], ARGV[2], 'EX', ARGV[3])
return nil
"""


class SessionsAway(Exception):  # noqa: N818  # a state, not a bug
    """Redis does not answer in time: bindings are unknown."""


@dataclass(frozen=True, slots=True)
class Binding:
    """A session's worker. It names the incarnation, since a restart loses the cache and thus voids the binding."""

    worker_id: str
    incarnation: str
    version: int = 1

    def encode(self) -> bytes:
        """The value to store."""
        return json.dumps([self.worker_id, self.incarnation, self.version]).encode()


@dataclass(frozen=True, slots=True)
class Held:
    """A session's entry in Redis; `binding` is None if the value is unreadable, as by another release."""

    raw: bytes
    binding: Binding | None


def decode(raw: bytes) -> Held:
    """Read a stored value."""
    try:
        worker_id, incarnation, version = json.loads(raw)
        return Held(raw, Binding(str(worker_id), str(incarnation), int(version)))
    except (ValueError, TypeError) as error:
        log.warning("session binding ignored: %s", error)
        return Held(raw, None)


class Sessions:
    """Bindings of all sessions. Raises :class:`SessionsAway` after the time-out, or at once during a known outage.

    `observe` gets the duration of each operation on Redis in seconds; `clock` is monotonic, in seconds.
    """

    def __init__(
        self,
        client: redis.Redis,
        keys: RedisKeys,
        access: RedisAccess,
        timeout_s: float,
        observe: Callable[[float], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._redis = Batcher(client, timeout_s)
        self._keys = keys
        self._breaker = Breaker(DEPENDENCY)
        self._observe = observe
        self._clock = clock
        # By key, the oldest first: the value in Redis, the binding, until when. The garbage collector leaves tuples of
        # bytes and numbers alone after its first look; Held and Binding of many sessions would stop the loop for 15 ms.
        self._remembered: OrderedDict[str, tuple[bytes, bytes, float]] = OrderedDict()
        self._outage = RedisOutage(log, access, "sessions go by rendezvous hashing")

    def connect(self) -> None:
        """Connect to Redis ahead of the first request, unless connected."""
        self._redis.connect()

    def available(self) -> bool:
        """Whether the breaker allows a call to Redis now."""
        return self._breaker.allows(self._clock())

    async def read(self, tenant: str, session: str, *, touch: bool) -> Held | None:
        """Return the session's entry, as remembered or in Redis; `touch` resets its time to live there."""
        key = self._keys.session(tenant, session)
        if (remembered := self._remembered.get(key)) and self._clock() < remembered[2]:
            return Held(remembered[0], decode(remembered[1]).binding)
        raw = await self._ask(*(("GETEX", key, "EX", SESSION_TTL_S) if touch else ("GET", key)))
        if raw is None:
            return None
        return self._remember(key, decode(raw)) if touch else decode(raw)

    async def bind(self, tenant: str, session: str, expected: Held | None, wanted: Binding) -> Held:
        """Write `wanted` if the session holds `expected` or nothing; return what it holds afterwards.

        If Redis is away, it is remembered here, to be written over `expected` when the session moves again.
        """
        key, new = self._keys.session(tenant, session), wanted.encode()
        try:
            if expected is None:
                raw = await self._ask("SET", key, new, "NX", "GET", "EX", SESSION_TTL_S)
            else:
                raw = await self._ask("EVAL", _COMPARE_AND_SET, 1, key, expected.raw, new, SESSION_TTL_S)
        except SessionsAway:
            self._remember(key, Held(expected.raw if expected else new, wanted))
            raise
        return self._remember(key, decode(raw) if raw is not None else Held(new, wanted))

    def _remember(self, key: str, held: Held) -> Held:
        if held.binding is not None:
            self._remembered[key] = held.raw, held.binding.encode(), self._clock() + REMEMBERED_S
            self._remembered.move_to_end(key)
            if len(self._remembered) > MAX_REMEMBERED:
                self._remembered.popitem(last=False)
        return held

    async def _ask(self, *command: Argument) -> bytes | None:
        now = self._clock()
        if not self._breaker.allows(now):
            raise SessionsAway("Redis has not answered lately")
        self._breaker.called(now)
        try:
            raw: bytes | None = await self._redis.run(*command)
        except (RedisError, OSError) as error:
            self._breaker.fault(self._clock())
            if not self.available():  # one slow answer is not an outage
                self._outage.failed(error)
            raise SessionsAway(f"Redis: {error}") from error
        finally:
            self._observe(self._clock() - now)
        self._breaker.success(self._clock())
        self._outage.ended()
        return raw
