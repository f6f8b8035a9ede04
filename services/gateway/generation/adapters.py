"""The adapters that were loaded while the installation runs: Redis has the list, which all gateways read.

Workers need no list: a request carries its adapter's digest and source, and a worker that does not have the adapter
loads it. So every worker serves an adapter, including workers that start later.
"""

from __future__ import annotations

import logging
from typing import cast

from services.common.adapters import RegisteredAdapter, is_name
from services.common.keys import RedisKeys
from services.common.unreadable import Unreadable
from services.gateway.tenants.redis_guard import RedisAwayError, RedisGuard

log = logging.getLogger(__name__)


class AdapterRegistry:
    """Reads and writes the list. Writing raises RedisAwayError while Redis does not answer."""

    def __init__(self, guard: RedisGuard, keys: RedisKeys) -> None:
        self._guard, self._key = guard, keys.adapters
        self._unreadable = Unreadable(log)

    async def read(self) -> dict[str, RegisteredAdapter] | None:
        """The adapters by name, without those that this version cannot read; None while Redis is away."""
        client = self._guard.client
        try:
            texts = cast("dict[bytes, bytes]", await self._guard.run(lambda: client.hgetall(self._key)))
        except RedisAwayError:
            return None
        adapters = {name.decode(): self._decoded(name.decode(), text) for name, text in texts.items()}
        return {name: adapter for name, adapter in adapters.items() if adapter is not None}

    async def find(self, name: str) -> RegisteredAdapter | None:
        """An adapter; None if there is none, or while Redis is away."""
        if not is_name(name):
            return None
        client = self._guard.client
        try:
            text = await self._guard.run(lambda: client.hget(self._key, name))
        except RedisAwayError:
            return None
        return None if text is None else self._decoded(name, text)

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

    def _decoded(self, name: str, text: bytes | str) -> RegisteredAdapter | None:
        try:
            return RegisteredAdapter.from_json(name, text)
        except ValueError as error:
            self._unreadable.note(self._key, name, text, error)
            return None
