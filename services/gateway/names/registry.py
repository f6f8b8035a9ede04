"""Live routes in Redis: a hash of routes with their versions, and a list of all changes."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from typing import Literal, cast

import msgspec
from redis.asyncio.client import Pipeline
from redis.exceptions import NoPermissionError

from services.common.keys import RedisKeys
from services.gateway.errors import ApiError
from services.gateway.names.route import ModelRoute
from services.gateway.tenants.redis_guard import RedisAwayError, RedisGuard

log = logging.getLogger(__name__)


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
        self._unreadable: dict[str, bytes] = {}  # values that were logged
        self._forbidden = False

    async def all(self) -> dict[str, LiveRoute]:
        """The live routes by name; a value that this version cannot read is logged once and left out."""
        entries = await self._guard.run(self._entries)
        routes = {name.decode(): self._decoded(name.decode(), text) for name, text in entries.items()}
        return {name: route for name, route in routes.items() if route is not None}

    async def _entries(self) -> dict[bytes, bytes]:
        try:
            entries = cast("dict[bytes, bytes]", await self._guard.client.hgetall(self._keys.routes))
        except NoPermissionError as error:  # no outage: Redis has the rules of an earlier version
            if not self._forbidden:
                log.error("the Redis user of gateways may not read live routes, it needs ~%s*", self._keys.routes)
            self._forbidden = True
            raise RedisAwayError(str(error)) from error
        self._forbidden = False
        return entries

    async def history(self, name: str, count: int) -> list[RouteChange]:
        """The last changes, the newest first; of one route if `name` is not empty."""
        client = self._guard.client
        texts = await self._guard.run(lambda: client.lrange(self._keys.route_changes, 0, HISTORY - 1))
        changes = (msgspec.json.decode(text, type=RouteChange) for text in texts)
        return [change for change in changes if name in ("", change.name)][:count]

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
        return None if text is None else msgspec.json.decode(text, type=LiveRoute)

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

    def _decoded(self, name: str, text: bytes) -> LiveRoute | None:
        try:
            return msgspec.json.decode(text, type=LiveRoute)
        except msgspec.DecodeError as error:
            if self._unreadable.get(name) != text:
                self._unreadable[name] = text
                log.error("the live route %r cannot be read and is left out: %s", name, error)
            return None
