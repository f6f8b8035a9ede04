"""The adapters that were loaded while the installation runs: Redis has the list, which all gateways read.

Workers need no list: a request carries its adapter's digest and source, and a worker that does not have the adapter
loads it. So every worker serves an adapter, including workers that start later.
"""

from __future__ import annotations

from services.common.adapters import RegisteredAdapter, read_registered
from services.common.keys import RedisKeys
from services.gateway.tenants.redis_guard import RedisAwayError, RedisGuard


class AdapterRegistry:
    """Reads and writes the list. Writing raises RedisAwayError while Redis does not answer."""

    def __init__(self, guard: RedisGuard, keys: RedisKeys) -> None:
        self._guard, self._key = guard, keys.adapters

    async def read(self) -> dict[str, RegisteredAdapter] | None:
        """The adapters by name; None while Redis is away."""
        client = self._guard.client
        try:
            texts = await self._guard.run(lambda: client.hgetall(self._key))
        except RedisAwayError:
            return None
        return read_registered(texts)

    async def write(self, adapter: RegisteredAdapter, *, replace: bool) -> bool:
        """Add an adapter; returns False, and changes nothing, if its name is taken and not to be replaced."""
        text = adapter.to_json()
        client = self._guard.client
        if not replace:
            return bool(await self._guard.run(lambda: client.hsetnx(self._key, adapter.name, text)))
        await self._guard.run(lambda: client.hset(self._key, adapter.name, text))
        return True

    async def remove(self, name: str) -> bool:
        """Remove an adapter; returns whether it was there."""
        client = self._guard.client
        return bool(await self._guard.run(lambda: client.hdel(self._key, name)))
