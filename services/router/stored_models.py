"""The models whose cards are in Redis. Where no list names the expected models, these are known without workers."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

import redis.asyncio as redis
from redis.exceptions import RedisError

from services.common.keys import RedisKeys
from services.common.redis_client import RedisAccess
from services.common.redis_outage import RedisOutage

# A model is known for so long after a gateway has last stored its card; gateways store cards more often.
KNOWN_S = 3600.0
READ_S = 2.0

log = logging.getLogger(__name__)


class StoredModels:
    """Calls `expect` with the names, after the first read and whenever they change. While Redis is away, they stay."""

    def __init__(
        self, client: redis.Redis, keys: RedisKeys, access: RedisAccess, expect: Callable[[frozenset[str]], None]
    ) -> None:
        self._client = client
        self._key = keys.card_times
        self._expect = expect
        self._names: frozenset[str] | None = None
        self._outage = RedisOutage(log, access, "models without workers are not known")

    async def run(self) -> None:
        """Read until cancelled."""
        while True:
            names = await self._read()
            if names != self._names:
                self._names = names
                self._expect(names)
            await asyncio.sleep(READ_S)

    async def _read(self) -> frozenset[str]:
        try:
            names = await self._client.zrangebyscore(self._key, time.time() - KNOWN_S, "+inf")
        except (RedisError, OSError) as error:
            self._outage.failed(error)
            return self._names or frozenset()
        self._outage.ended()
        return frozenset(name.decode() for name in names if isinstance(name, bytes))
