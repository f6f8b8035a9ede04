"""Bindings of sessions to workers: one key per session in Redis, written by compare-and-set."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import redis.asyncio as redis
from redis.exceptions import RedisError

from services.common.keys import RedisKeys
from services.common.redis_client import Argument, Batcher, RedisAccess
from services.common.redis_outage import RedisOutage
from services.router.breaker import DEPENDENCY, Breaker

SESSION_TTL_S = 30 * 60
log = logging.getLogger(__name__)

# Sets KEYS[1] to ARGV[2] if it holds ARGV[1] or nothing; returns the value that it holds afterwards.
_COMPARE_AND_SET = """
local held = redis.call('GET', KEYS[1])
if held and held ~= ARGV[1] then return held end
redis.call('SET', KEYS[1], ARGV[2], 'EX', ARGV[3])
return ARGV[2]
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

    `observe` gets the duration of each operation in seconds.
    """

    def __init__(
        self,
        client: redis.Redis,
        keys: RedisKeys,
        access: RedisAccess,
        timeout_s: float,
        observe: Callable[[float], None],
    ) -> None:
        self._redis = Batcher(client, timeout_s)
        self._keys = keys
        self._breaker = Breaker(DEPENDENCY)
        self._observe = observe
        self._outage = RedisOutage(log, access, "sessions go by rendezvous hashing")

    def connect(self) -> None:
        """Connect to Redis ahead of the first request, unless connected."""
        self._redis.connect()

    def available(self) -> bool:
        """Whether the breaker allows a call to Redis now."""
        return self._breaker.allows(time.monotonic())

    async def read(self, tenant: str, session: str, *, touch: bool) -> Held | None:
        """Return the session's entry in Redis; `touch` resets its time to live to `SESSION_TTL_S`."""
        key = self._keys.session(tenant, session)
        raw = await self._ask(*(("GETEX", key, "EX", SESSION_TTL_S) if touch else ("GET", key)))
        return decode(raw) if raw is not None else None

    async def bind(self, tenant: str, session: str, expected: Held | None, wanted: Binding) -> Held:
        """Write `wanted` if the session holds `expected` or nothing; return what it holds afterwards."""
        key, old = self._keys.session(tenant, session), expected.raw if expected else b""
        raw = await self._ask("EVAL", _COMPARE_AND_SET, 1, key, old, wanted.encode(), SESSION_TTL_S)
        return decode(raw) if raw is not None else Held(wanted.encode(), wanted)

    async def _ask(self, *command: Argument) -> bytes | None:
        now = time.monotonic()
        if not self._breaker.allows(now):
            raise SessionsAway("Redis has not answered lately")
        self._breaker.called(now)
        try:
            raw: bytes | None = await self._redis.run(*command)
        except (RedisError, OSError) as error:
            self._breaker.fault(time.monotonic())
            if not self.available():  # one slow answer is not an outage
                self._outage.failed(error)
            raise SessionsAway(f"Redis: {error}") from error
        finally:
            self._observe(time.monotonic() - now)
        self._breaker.success(time.monotonic())
        self._outage.ended()
        return raw
