"""Objects that tenants keep in Redis, each for a while after its last use: responses and conversations."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from services.common.keys import RedisKeys
from services.gateway.errors import ApiError
from services.gateway.http.responses import scripts
from services.gateway.tenants.redis_guard import RedisAwayError, RedisGuard

T = TypeVar("T")
_INLINE_BYTES = 64 * 1024
_FULL, _CHANGED = -1, -2
MAX_KEPT = 10_000  # objects of a tenant; the least recently used ones make room


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """Limits of kept objects: sizes, and their life."""

    life_s: float
    response_bytes: int
    tenant_bytes: int
    conversation_bytes: int


class ChangedError(Exception):
    """Another object is kept, or none, in the place of the one that was to be replaced."""


class LostEventsError(Exception):
    """The events' job has another owner, or their object is gone."""


def away(error: RedisAwayError) -> ApiError:
    """503: Redis does not answer."""
    message = "Kept responses cannot be reached at the moment; with `store` false no response needs them."
    unavailable = ApiError(503, message, "service_unavailable_error", "store", "store_unavailable", retry_after_s=2)
    unavailable.__cause__ = error
    return unavailable


class KeptObjects:
    """Keeps objects as bytes by tenant and id. All methods raise :class:`ApiError` 503 while Redis is away."""

    def __init__(self, guard: RedisGuard, keys: RedisKeys, limits: StoreLimits) -> None:
        self.limits = limits
        self._guard = guard
        self._keys = keys
        names = scripts.KEEP, scripts.USE, scripts.FORGET, scripts.RECORD
        self._keep, self._use, self._forget, self._record = map(guard.client.register_script, names)

    async def check(self) -> None:
        """Return when something could be kept now."""
        await self._guarded(self._guard.client.ping)

    async def keep(self, tenant: str, object_id: str, data: bytes, replaces: str = "") -> None:
        """Keep an object; the tenant's least recently used ones make room.

        `replaces`: SHA-1 of the object that is there; raises ChangedError when that is another one, 503 without room.
        """
        bounds = str(self.limits.tenant_bytes), str(MAX_KEPT)
        outcome = await self._run(self._keep, tenant, object_id, data, *bounds, replaces)
        if outcome == _CHANGED:
            raise ChangedError
        if outcome == _FULL:
            message = "There is no room to keep a response at the moment; with `store` false none is needed."
            raise ApiError(503, message, "service_unavailable_error", "store", "store_full", retry_after_s=10)

    async def get(self, tenant: str, object_id: str) -> bytes | None:
        """An object."""
        key = self._keys.kept_response(tenant, object_id)
        data: bytes | None = await self._guarded(lambda: self._guard.client.get(key))
        return data

    async def use(self, tenant: str, ids: Sequence[str]) -> list[bytes | None]:
        """Objects, which live on."""
        values: list[bytes | None] = await self._run(self._use, tenant, *ids)
        return values

    async def forget(self, tenant: str, object_id: str) -> bool:
        """Delete an object with its events; returns whether it was there."""
        return bool(await self._run(self._forget, tenant, object_id))

    async def ids(self, tenant: str, prefix: str) -> list[str]:
        """The ids with a prefix, the last used one first; some may have expired."""
        key = self._keys.kept_index(tenant)
        members: Any = await self._guarded(lambda: self._guard.client.zrange(key, 0, -1, desc=True))
        return [name for member in members if (name := member.decode()).startswith(prefix)]

    async def listed(
        self, tenant: str, prefix: str, after: str, limit: int, brief: Callable[[bytes], Awaitable[dict[str, Any]]]
    ) -> tuple[list[dict[str, Any]], bool]:
        """The last used objects, or those behind `after`, as `brief` describes them, and whether there are more."""
        ids, page = await self.ids(tenant, prefix), list[dict[str, Any]]()
        for name in ids[ids.index(after) + 1 :] if after in ids else ids:
            if (data := await self.get(tenant, name)) is None:  # expired, and still in the index
                continue
            if len(page) == limit:
                return page, True
            page.append(await brief(data))
        return page, False

    async def record(self, tenant: str, object_id: str, owner: str, events: Sequence[bytes]) -> int:
        """Append events to an object, as the owner of its job; returns how many it has.

        An empty owner is the object's creator. Raises LostEventsError, and 400 when they are too large.
        """
        member = self._keys.member(tenant, object_id)
        most = str(2 * self.limits.response_bytes)
        owners = self._keys.background_jobs.owners
        count = await self._run(self._record, tenant, object_id, member, owner, most, *events, more=[owners])
        if count is None:
            raise LostEventsError
        if count < 0:
            message = f"A response that is kept may have at most {most} bytes with its events."
            raise ApiError(400, message, "invalid_request_error", "store", "response_too_large")
        return int(count)

    async def events(self, tenant: str, object_id: str, start: int) -> list[bytes]:
        """An object's events from number `start` on."""
        key = self._keys.kept_response(tenant, f"{object_id}:events")
        events: Any = await self._guarded(lambda: self._guard.client.lrange(key, start, -1))
        return list(events)

    async def _run(self, script: Any, tenant: str, *arguments: str | bytes, more: Sequence[str] = ()) -> Any:
        keys = [self._keys.kept_index(tenant), self._keys.kept_sizes(tenant), *more]
        life_ms = str(max(1, int(1000 * self.limits.life_s)))
        args = [self._keys.kept_response(tenant, ""), life_ms, *arguments]
        return await self._guarded(lambda: script(keys=keys, args=args))

    async def _guarded(self, operation: Callable[[], Any]) -> Any:
        try:
            return await self._guard.run(operation)
        except RedisAwayError as error:
            raise away(error) from error


def digest_of(data: bytes) -> str:
    """SHA-1, which Redis's scripts can compute; it distinguishes versions of an object, and is no secret."""
    return hashlib.sha1(data, usedforsecurity=False).hexdigest()


async def off_loop(size: int, work: Callable[[], T]) -> T:
    """Run `work` on `size` bytes, in a thread if it would take long."""
    return work() if size < _INLINE_BYTES else await asyncio.to_thread(work)
