"""All routes of an installation: those of its file, and the live ones in Redis, which win by name."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from services.common.adapters import is_name
from services.common.lifecycle import StartupError
from services.common.tls.certificate import file_stamp
from services.gateway.names.registry import LiveRoute, RouteRegistry
from services.gateway.names.route import FixedRoutes, ModelRoute, read_routes
from services.gateway.tenants.redis_guard import RedisAwayError

log = logging.getLogger(__name__)

_READ_EVERY_S = 1.0


@dataclass(frozen=True, slots=True)
class Routes:
    """The routes by name, as last read."""

    fixed: FixedRoutes
    live: Mapping[str, LiveRoute]

    def get(self, name: str) -> ModelRoute | None:
        """A route; None for a name that is none."""
        live = self.live.get(name)
        return live.route if live else self.fixed.routes.get(name)

    def all(self) -> dict[str, ModelRoute]:
        """All routes, in the order of their names."""
        routes = {**self.fixed.routes, **{name: live.route for name, live in self.live.items()}}
        return {name: routes[name] for name in sorted(routes)}


class RouteTable:
    """Reads the file and Redis every second; keeps what it has while one of them cannot be read.

    Requests after a change by :meth:`set` or :meth:`delete` see it in this gateway, and in others within two seconds;
    a new name is found there at once by :meth:`look_up`.
    """

    def __init__(self, path: str, registry: RouteRegistry) -> None:
        """`path`: JSON file; empty: none. Raises :class:`StartupError` when it cannot be used."""
        self._path = Path(path) if path else None
        self.registry = registry
        self._stamp = file_stamp(self._path) if self._path else None
        try:
            fixed = read_routes(self._path.read_bytes()) if self._path else FixedRoutes()
        except (OSError, ValueError) as error:
            raise StartupError(f"routes in {path}: {error}") from error
        self.routes = Routes(fixed, {})
        self._reading = asyncio.Lock()  # no older reading replaces a newer one

    async def run(self) -> None:
        """Refresh until cancelled."""
        while True:
            await self.refresh()
            await asyncio.sleep(_READ_EVERY_S)

    async def refresh(self) -> None:
        """Read both sources again."""
        async with self._reading:
            fixed = self._changed_file()
            try:
                live: Mapping[str, LiveRoute] = await self.registry.all()
            except RedisAwayError:
                live = self.routes.live
            self.routes = Routes(self.routes.fixed if fixed is None else fixed, live)

    async def look_up(self, name: str) -> None:
        """Ask Redis for a name that is none here: another gateway may have made the route a moment ago.

        It asks for this name alone, so that unknown names cost no more than unknown keys.
        """
        async with self._reading:
            if self.routes.get(name) is None and is_name(name):
                with suppress(RedisAwayError):
                    if live := await self.registry.get(name):
                        self.routes = Routes(self.routes.fixed, {**self.routes.live, name: live})

    async def set(self, name: str, route: ModelRoute, by: str, if_version: int | None = None) -> LiveRoute:
        """Store a live route; raises as :meth:`RouteRegistry.set`."""
        live = await self.registry.set(name, route, by, if_version)
        await self.refresh()
        return live

    async def delete(self, name: str, by: str, if_version: int | None = None) -> LiveRoute:
        """Remove a live route and return it; raises as :meth:`RouteRegistry.delete`."""
        live = await self.registry.delete(name, by, if_version)
        await self.refresh()
        return live

    def _changed_file(self) -> FixedRoutes | None:
        """The file's routes if it has changed and can be used."""
        if self._path is None or (stamp := file_stamp(self._path)) == self._stamp:
            return None
        self._stamp = stamp
        try:
            fixed = read_routes(self._path.read_bytes())
        except (OSError, ValueError) as error:
            log.error("the routes in %s are not read, the last ones stay: %s", self._path, error)
            return None
        log.info("routes read again: %s", ", ".join(sorted(fixed.routes)) or "none")
        return fixed
