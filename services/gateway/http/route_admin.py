"""The administration of routes. Every change is written to the log and to the history in Redis, with its author."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response

from services.common.adapters import check_name
from services.gateway.api.decode import BodyDecoder, explain
from services.gateway.errors import invalid, too_large
from services.gateway.names.canaries import Canaries
from services.gateway.names.canary import Canary, CanaryOrder, Tally
from services.gateway.names.registry import HISTORY, LiveRoute
from services.gateway.names.route import ModelRoute, read_route
from services.gateway.names.table import RouteTable

audit = logging.getLogger("services.gateway.audit")

_MAX_BODY_BYTES = 64 * 1024
_ORDER = BodyDecoder(CanaryOrder)


def add_route_admin(app: FastAPI, table: RouteTable, who: Any) -> None:
    """Add the endpoints to the app of the administration; `who` is the dependency that names the caller."""
    registry = table.registry

    @app.get("/admin/routes")
    async def routes(_caller: str = who) -> dict[str, Any]:
        live = await registry.all()
        fixed = {name: route for name, route in table.routes.fixed.routes.items() if name not in live}
        listed = [_shown(name, live.get(name) or fixed[name]) for name in sorted({*live, *fixed})]
        return {"routes": listed}

    @app.get("/admin/route-changes")
    async def changes(name: str = "", limit: int = HISTORY, _caller: str = who) -> dict[str, Any]:
        return {"changes": msgspec.to_builtins(await registry.history(name, limit))}

    @app.put("/admin/routes/{name:path}")
    async def put(name: str, request: Request, if_version: int | None = None, caller: str = who) -> dict[str, Any]:
        route = _route(name, await body_of(request))
        try:
            table.routes.fixed.check(route)
        except ValueError as error:
            raise invalid(f"{error}.", "fallbacks") from error
        live = await table.set(name, route, caller, if_version)
        _record("set", name, live.version, caller)
        return _shown(name, live)

    @app.delete("/admin/routes/{name:path}", status_code=204, response_class=Response)
    async def delete(name: str, if_version: int | None = None, caller: str = who) -> None:
        live = await table.delete(name, caller, if_version)
        _record("deleted", name, live.version, caller)


def add_canary_admin(app: FastAPI, canaries: Canaries, who: Any) -> None:
    """Add the endpoints of canaries, as `add_route_admin`."""

    @app.get("/admin/canaries")
    async def listed(_caller: str = who) -> dict[str, Any]:
        return {"canaries": [_canary(name, *each) for name, each in (await canaries.all()).items()]}

    @app.put("/admin/canaries/{name:path}")
    async def start(name: str, request: Request, caller: str = who) -> dict[str, Any]:
        order = await _ORDER.decode(await body_of(request))
        canary = await canaries.start(name, order, caller)
        _record("given a canary", name, canary.version, caller)
        return _canary(name, canary, Tally())

    @app.delete("/admin/canaries/{name:path}")
    async def stop(name: str, caller: str = who) -> dict[str, Any]:
        canary = await canaries.stop(name, caller)
        _record("rid of its canary", name, canary.version, caller)
        return _canary(name, canary, Tally())


async def body_of(request: Request) -> bytes:
    """The body of an administrator's request; raises :class:`ApiError` 413."""
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > _MAX_BODY_BYTES:
            raise too_large(_MAX_BODY_BYTES)
    return body


def _route(name: str, body: bytes) -> ModelRoute:
    """Raises :class:`ApiError` 400 that names the field."""
    try:
        check_name(name)
    except ValueError as error:
        raise invalid(f"`name`: {error}.", "name") from error
    try:
        return read_route(msgspec.json.decode(body))
    except msgspec.ValidationError as error:
        raise explain(error, ModelRoute) from error
    except msgspec.DecodeError as error:
        raise invalid(f"The body is not JSON: {error}", code="invalid_json") from error


def _canary(name: str, canary: Canary, tally: Tally) -> dict[str, Any]:
    return {"name": name, **msgspec.to_builtins(canary), "weight": canary.weight, "tally": msgspec.to_builtins(tally)}


def _shown(name: str, route: ModelRoute | LiveRoute) -> dict[str, Any]:
    if isinstance(route, ModelRoute):
        return {"name": name, "source": "file", "route": msgspec.to_builtins(route)}
    return {"name": name, "source": "live", **msgspec.to_builtins(route)}


def _record(action: str, name: str, version: int, caller: str) -> None:
    audit.info("route %s", action, extra={"route": name, "version": version, "by": caller})
