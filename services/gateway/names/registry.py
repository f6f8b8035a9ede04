"""Live routes in Redis: a hash of routes with their versions, and a list of all changes."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from typing import Literal, TypeVar, cast

import msgspec
from redis.asyncio.client import Pipeline
from redis.exceptions import NoPermissionError

from services.common.keys import RedisKeys
from services.common.unreadable import Unreadable
from services.gateway.errors import ApiError
from services.gateway.names.route import ModelRoute
from services.gateway.tenants.redis_guard import RedisAwayError, RedisGuard

log = logging.getLogger(__name__)

T = TypeVar("T")
Reply = TypeVar("Reply")

MAX_LIVE = 1000  # live routes
HISTORY = 1000  # changes that Redis keeps


class LiveRoute(msgspec.Struct, frozen=True, kw_only=True):
    """A route as Redis has it."""

    route: ModelRoute
    version: int  # greater than all earlier ones, those of other routes included
    by: str  # the administrator
    at: float  # seconds since the epoch


class RouteChange(msgspec.Struct, frozen=True, kw_only=True):
    """An entry of the history."""

    name: str
    action: Literal["set", "deleted"]
    version: int
    by: str
    at: float
    route: ModelRoute | None = None


class RouteRegistry:
    """Reads and changes live routes. All methods raise :class:`RedisAwayError`."""

    def __init__(self, guard: RedisGuard, keys: RedisKeys, now: Callable[[], float] = time.time) -> None:
        self._guard, self._keys, self._now = guard, keys, now
        self._unreadable = Unreadable(log)
        self._forbidden: set[str] = set()  # keys that may not be read

    async def all(self) -> dict[str, LiveRoute]:
        """The live routes by name."""
        return await self.read(self._keys.routes, LiveRoute)

    async def read(self, key: str, kind: type[T]) -> dict[str, T]:
        """A hash of routes or of canaries by the route's name; values that this version cannot read are left out."""
        client = self._guard.client
        stored = cast("dict[bytes, bytes]", await self._asked(key, lambda: client.hgetall(key)))
        entries = {name.decode(): text for name, text in stored.items()}
        values = {name: self._decoded(key, name, entries[name], kind) for name in sorted(entries)}
        return {name: value for name, value in values.items() if value is not None}

    async def get(self, name: str) -> LiveRoute | None:
        """One live route; None also for a value that this version cannot read."""
        key, client = self._keys.routes, self._guard.client
        text = await self._asked(key, lambda: client.hget(key, name))
        return None if text is None else self._decoded(key, name, text, LiveRoute)

    async def _asked(self, key: str, read: Callable[[], Awaitable[Reply]]) -> Reply:
        async def permitted() -> Reply:
            try:
                reply = await read()
            except NoPermissionError as error:  # no outage: Redis has the rules of an earlier version
                if key not in self._forbidden:
                    log.error("the Redis user of gateways may not read %s, it needs ~%s*", key, self._keys.routes)
                self._forbidden.add(key)
                raise RedisAwayError(str(error)) from error
            self._forbidden.discard(key)
            return reply

        return await self._guard.run(permitted)

    async def history(self, name: str, count: int) -> list[RouteChange]:
        """The last changes, the newest first; of one route if `name` is not empty."""
        key, client = self._keys.route_changes, self._guard.client
        texts = cast("list[bytes]", await self._guard.run(lambda: client.lrange(key, 0, HISTORY - 1)))
        changes = (self._decoded(key, text.decode(), text, RouteChange) for text in texts)
        return [change for change in changes if change is not None and name in ("", change.name)][:count]

    async def set(self, name: str, route: ModelRoute, by: str, if_version: int | None = None) -> LiveRoute:
        """Store a route; raises :class:`ApiError` 409 if its version is not `if_version` (0: there must be none)."""

        async def attempt(pipe: Pipeline) -> LiveRoute:
            current = await self._watched(pipe, name)
            self._check_version(name, current, if_version)
            if current is None and await pipe.hlen(self._keys.routes) >= MAX_LIVE:
                raise ApiError(400, f"There are {MAX_LIVE} live routes already.", "invalid_request_error", "name")
            live = LiveRoute(route=route, version=await self._next_version(pipe), by=by, at=self._now())
            pipe.multi()  # type: ignore[no-untyped-call]
            pipe.hset(self._keys.routes, name, msgspec.json.encode(live))
            self._note(pipe, RouteChange(name=name, action="set", version=live.version, by=by, at=live.at, route=route))
            return live

        return await self._changed(name, attempt)

    async def delete(self, name: str, by: str, if_version: int | None = None) -> LiveRoute:
        """Remove a route and return it; raises :class:`ApiError` 404, or 409 as :meth:`set`."""

        async def attempt(pipe: Pipeline) -> LiveRoute:
            current = await self._watched(pipe, name)
            if current is None:
                raise ApiError(404, f"There is no live route `{name}`.", "invalid_request_error", "name", "no_route")
            self._check_version(name, current, if_version)
            version = await self._next_version(pipe)
            pipe.multi()  # type: ignore[no-untyped-call]
            pipe.hdel(self._keys.routes, name)
            self._note(pipe, RouteChange(name=name, action="deleted", version=version, by=by, at=self._now()))
            return current

        return await self._changed(name, attempt)

    async def _changed(self, name: str, attempt: Callable[[Pipeline], Awaitable[LiveRoute]]) -> LiveRoute:
        """Run the commands that `attempt` queues, again if another gateway has changed a route meanwhile."""
        keys = (self._keys.routes, self._keys.routes_version)
        return await self._guard.change(keys, f"The route `{name}`", attempt)

    async def _watched(self, pipe: Pipeline, name: str) -> LiveRoute | None:
        text = await pipe.hget(self._keys.routes, name)
        return None if text is None else self._decoded(self._keys.routes, name, text, LiveRoute)

    async def _next_version(self, pipe: Pipeline) -> int:
        return int(await pipe.get(self._keys.routes_version) or 0) + 1

    def _note(self, pipe: Pipeline, change: RouteChange) -> None:
        pipe.set(self._keys.routes_version, change.version)
        pipe.lpush(self._keys.route_changes, msgspec.json.encode(change))
        pipe.ltrim(self._keys.route_changes, 0, HISTORY - 1)

    @staticmethod
    def _check_version(name: str, current: LiveRoute | None, if_version: int | None) -> None:
        version = current.version if current else 0
        if if_version not in (None, version):
            message = f"The live route `{name}` has version {version}, not {if_version} (0: there is none)."
            raise ApiError(409, message, "invalid_request_error", "if_version", "version_conflict")

    def _decoded(self, key: str, name: str, text: bytes | str, kind: type[T]) -> T | None:
        """The value; None if this version cannot read it, which is logged once."""
        try:
            return msgspec.json.decode(text, type=kind)
        except msgspec.DecodeError as error:
            self._unreadable.note(key, name, text, error)
            return None
