"""Counts the gateways: each sends heartbeats to Redis, which returns the number of live gateways."""

from __future__ import annotations

import asyncio
import contextlib

from services.common.keys import RedisKeys
from services.gateway.tenants.redis_guard import RedisAwayError, RedisGuard

BEAT_S = 1.0
LEASE_TTL_S = 5.0

# Keys: time of each gateway's last heartbeat, by Redis's clock, since machines' clocks differ.
_BEAT = """
local clock = redis.call('TIME')
local now = clock[1] + clock[2] / 1e6
redis.call('ZADD', KEYS[1], string.format('%.6f', now), ARGV[1])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now - ARGV[2])
return redis.call('ZCARD', KEYS[1])
"""


class Peers:
    """The number of live gateways, including this one; while Redis is away, the last known number."""

    def __init__(self, guard: RedisGuard, keys: RedisKeys, gateway_id: str) -> None:
        self._guard = guard
        self._key = keys.gateways
        self._id = gateway_id
        self._beat = guard.client.register_script(_BEAT)
        self.live = 1

    async def run(self) -> None:
        """Send heartbeats until cancelled, then remove this gateway."""
        try:
            while True:
                with contextlib.suppress(RedisAwayError):
                    self.live = int(
                        await self._guard.run(lambda: self._beat(keys=[self._key], args=[self._id, LEASE_TTL_S]))
                    )
                await asyncio.sleep(BEAT_S)
        finally:
            with contextlib.suppress(RedisAwayError):  # the entry expires by itself
                await self._guard.run(lambda: self._guard.client.zrem(self._key, self._id))
