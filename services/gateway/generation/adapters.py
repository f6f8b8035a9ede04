"""The adapters that were loaded while the installation runs: Redis has the list, which all gateways read.

Workers need no list: a request carries its adapter's digest and source, and a worker that does not have the adapter
loads it. So an adapter holds on every worker, also on those that start later.
"""

from __future__ import annotations

import msgspec

from services.common.keys import RedisKeys
from services.gateway.tenants.redis_guard import RedisAwayError, RedisGuard
from services.gateway.text.codec import ServedAdapter


class _Entry(msgspec.Struct):
    base: str
    digest: str
    source: str


class AdapterRegistry:
    """Reads and writes the list. Writing raises RedisAwayError while Redis does not answer."""

    def __init__(self, guard: RedisGuard, keys: RedisKeys) -> None:
        self._guard, self._key = guard, keys.adapters

    async def read(self) -> dict[str, ServedAdapter] | None:
        """The adapters by name; None while Redis is away."""
        client = self._guard.client
        try:
            found = await self._guard.run(lambda: client.hgetall(self._key))
        except RedisAwayError:
            return None
        return {_text(name): _adapter(_text(name), text) for name, text in found.items()}

    async def write(self, adapter: ServedAdapter, *, replace: bool) -> bool:
        """Add an adapter; returns False, and changes nothing, if its name is taken and not to be replaced."""
        text = msgspec.json.encode(_Entry(adapter.base, adapter.digest, adapter.source))
        client = self._guard.client
        if not replace:
            return bool(await self._guard.run(lambda: client.hsetnx(self._key, adapter.name, text)))
        await self._guard.run(lambda: client.hset(self._key, adapter.name, text))
        return True

    async def remove(self, name: str) -> bool:
        """Remove an adapter; returns whether it was there."""
        client = self._guard.client
        return bool(await self._guard.run(lambda: client.hdel(self._key, name)))


def _adapter(name: str, text: bytes | str) -> ServedAdapter:
    entry = msgspec.json.decode(text, type=_Entry)
    return ServedAdapter(name, entry.base, entry.digest, entry.source)


def _text(value: bytes | str) -> str:
    return value if isinstance(value, str) else value.decode()
