"""The administration of keys and routes, on a port of its own. The log has every change, and no secret."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from hashlib import sha256
from hmac import compare_digest
from typing import Annotated, Any

import msgspec
from fastapi import Depends, FastAPI, Request, Response

from services.common.patterns import END
from services.gateway.api.decode import BodyDecoder
from services.gateway.asgi import ASGIApp, Receive, Scope, Send, authorization, headers_of
from services.gateway.drain import Drain
from services.gateway.errors import ApiError, invalid
from services.gateway.http.app import add_error_handlers
from services.gateway.http.exchange import OPENAI_DIALECT
from services.gateway.http.route_admin import add_canary_admin, add_route_admin, body_of
from services.gateway.http.server import HttpServer, serving_http
from services.gateway.names.canaries import Canaries
from services.gateway.names.table import RouteTable
from services.gateway.settings import GatewaySettings
from services.gateway.tenants.issued import IssuedKey
from services.gateway.tenants.key_registry import KeyRegistry
from services.gateway.tenants.keys import key_of, unauthorized
from services.gateway.tenants.tenant import Gate, TenantLimits

audit = logging.getLogger("services.gateway.audit")

_LONGEST_OVERLAP_S = 30 * 24 * 3600
_LONGEST_LIFE_S = 100 * 365 * 24 * 3600
_NEVER = "secrets", "id", "created_at", "until"  # fields of a record that are no limits


class NewKey(TenantLimits, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of `POST /admin/keys`."""

    name: Annotated[str, msgspec.Meta(pattern="^[A-Za-z0-9][A-Za-z0-9._@-]{0,127}" + END)]
    expires_in_s: Annotated[float, msgspec.Meta(ge=0, le=_LONGEST_LIFE_S)] = 0  # 0: never


class Rotation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of `POST /admin/keys/{id}/rotate`."""

    overlap_s: Annotated[float, msgspec.Meta(ge=0, le=_LONGEST_OVERLAP_S)] = 3600


class KeyPatch(TenantLimits, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields that `PATCH /admin/keys/{id}` may name; `name` must stay as it is."""


_NEW, _ROTATION, _LIMITS = BodyDecoder(NewKey), BodyDecoder(Rotation), BodyDecoder(KeyPatch)


class Administrator:
    """Identifies administrators: by the token of the settings, or by the key of a tenant that is one."""

    def __init__(self, token: str, gate: Gate) -> None:
        self._digest = sha256(token.encode()).digest() if token else b""
        self._gate = gate

    async def __call__(self, request: Request) -> str:
        """Return the caller's name; raises :class:`ApiError` 401 or 403."""
        given = authorization(headers_of(request.scope))
        if self._digest and compare_digest(sha256(key_of(given).encode()).digest(), self._digest):
            return "token"
        tenant = await self._gate.identify(given)
        if not tenant.name:
            raise unauthorized("The administrator's token is needed: send it as `Authorization: Bearer <token>`.")
        if not tenant.admin:
            raise ApiError(403, "This needs an administrator's key.", "permission_error", code="forbidden")
        return tenant.name


def new_admin_app(
    registry: KeyRegistry, table: RouteTable, canaries: Canaries, administrator: Administrator
) -> FastAPI:
    """Build the app."""
    app = FastAPI(title="Ryzanstein administration", docs_url=None, redoc_url=None, openapi_url=None)
    add_error_handlers(app, "Keys and routes")
    who: Any = Depends(administrator)

    @app.get("/admin/keys")
    async def keys(_caller: str = who) -> dict[str, Any]:
        return {"keys": [_shown(key) for key in await registry.all()]}

    @app.post("/admin/keys", status_code=201)
    async def create(request: Request, caller: str = who) -> dict[str, Any]:
        body = await _NEW.decode(await body_of(request))
        key, presented = await registry.create(body, body.expires_in_s)
        _record("created", key, caller)
        return _shown(key) | {"key": presented}

    @app.post("/admin/keys/{key_id}/rotate")
    async def rotate(key_id: str, request: Request, caller: str = who) -> dict[str, Any]:
        body = await _ROTATION.decode(await body_of(request) or b"{}")
        key, presented = await registry.rotate(key_id, body.overlap_s)
        _record("rotated", key, caller)
        return _shown(key) | {"key": presented}

    @app.patch("/admin/keys/{key_id}")
    async def limit(key_id: str, request: Request, caller: str = who) -> dict[str, Any]:
        key = await registry.limit(key_id, await _merged(await registry.get(key_id), await body_of(request)))
        _record("limited", key, caller)
        return _shown(key)

    @app.delete("/admin/keys/{key_id}", status_code=204, response_class=Response)
    async def revoke(key_id: str, caller: str = who) -> None:
        _record("revoked", await registry.revoke(key_id), caller)

    add_route_admin(app, table, who)
    add_canary_admin(app, canaries, who)
    return app


@asynccontextmanager
async def serving_admin(
    settings: GatewaySettings, registry: KeyRegistry, table: RouteTable, canaries: Canaries, gate: Gate
) -> AsyncIterator[HttpServer | None]:
    """Serve while the block runs; None with the port 0."""
    if not settings.admin_port:
        yield None
        return
    app = new_admin_app(registry, table, canaries, Administrator(settings.read_admin_token(), gate))
    async with serving_http(
        _in_openai_shape(app), settings, Drain(), (settings.admin_host, settings.admin_port)
    ) as server:
        yield server


def _in_openai_shape(app: ASGIApp) -> ASGIApp:
    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        scope["dialect"] = OPENAI_DIALECT
        await app(scope, receive, send)

    return call


async def _merged(key: IssuedKey, body: bytes) -> KeyPatch:
    """The limits of a key after a change that names only some of them."""
    try:
        named = msgspec.json.decode(body, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise invalid(f"The body is not a JSON object: {error}", code="invalid_json") from error
    if named.get("name", key.name) != key.name:
        raise invalid("`name` cannot be changed: create another key.", "name")
    before = {field: value for field, value in msgspec.to_builtins(key).items() if field not in _NEVER}
    return await _LIMITS.decode(msgspec.json.encode(before | named))


def _shown(key: IssuedKey) -> dict[str, Any]:
    """A key as it may be seen: its beginning, and no hash."""
    fields = {name: value for name, value in msgspec.to_builtins(key).items() if name != "secrets"}
    return fields | {"prefix": f"rz-{key.id}-", "secrets": len(key.secrets)}


def _record(what: str, key: IssuedKey, caller: str) -> None:
    audit.info("API key %s", what, extra={"key_id": key.id, "tenant": key.name, "by": caller})
