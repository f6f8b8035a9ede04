"""Loads and unloads adapters for administrators' keys, by vLLM's routes, and deletes them by OpenAI's."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from fastapi import FastAPI
from msgspec import Struct

from services.common.adapters import check_name, check_path
from services.common.tls.credentials import Tls
from services.gateway.api.decode import BodyDecoder
from services.gateway.errors import ApiError, invalid, storage_away, unavailable, unknown_model
from services.gateway.generation.adapters import AdapterRegistry
from services.gateway.generation.admitted import AdmittedRequest
from services.gateway.generation.models import check_permission
from services.gateway.http.documentation import Documentation
from services.gateway.http.exchange import Exchange
from services.gateway.http.identified import CallingTenant
from services.gateway.tenants.redis_guard import RedisAwayError
from services.gateway.tenants.tenant import Tenant
from services.gateway.upstream.adapters import inspect
from services.gateway.upstream.catalog import Catalog
from services.gateway.upstream.router import RouterClient


class LoadBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of a load."""

    lora_name: str
    lora_path: str
    load_inplace: bool | None = None
    base_model_name: str | None = None
    pinned: bool | None = None


class UnloadBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of an unload."""

    lora_name: str


Body = TypeVar("Body", bound=Struct)
LOAD = Documentation(
    summary="Load a LoRA adapter: it becomes a model name on all workers of its base",
    tag="administration",
    body=LoadBody,
    example={"lora_name": "sql", "lora_path": "/adapters/sql", "load_inplace": False, "pinned": False},
    answer={"message": "The adapter `sql` is served.", "id": "sql", "parent": "my-model", "digest": "0d6f8f2c9b1e4a57"},
)
UNLOAD = Documentation(
    summary="Unload a LoRA adapter; running requests end with it",
    tag="administration",
    body=UnloadBody,
    example={"lora_name": "sql"},
    answer={"message": "The adapter `sql` is no longer served.", "id": "sql"},
)


@dataclass(frozen=True, slots=True)
class AdapterAdmin:
    """Loads and unloads adapters."""

    catalog: Catalog
    router: RouterClient
    registry: AdapterRegistry
    tls: Tls | None = None

    async def load(self, body: LoadBody) -> dict[str, str]:
        """Check an adapter on its base's workers, then list it; raises :class:`ApiError`."""
        for field, value, check in (
            ("lora_name", body.lora_name, check_name),
            ("lora_path", body.lora_path, check_path),
        ):
            try:
                check(value)
            except ValueError as error:
                raise invalid(f"`{field}`: {error}.", field) from error
        base = self._base(body.base_model_name or "")
        await self.catalog.read_adapters()
        known = self.catalog.adapters().get(body.lora_name)
        if self.catalog.knows(body.lora_name) and (known is None or not body.load_inplace):
            hint = "; `load_inplace` replaces it" if known else ""
            raise invalid(f"`{body.lora_name}` is the name of a model that is served already{hint}.", "lora_name")
        if body.pinned:
            self._require_slot(base, body.lora_name)
        adapter = await inspect(self.router.listed.views, body.lora_name, base, body.lora_path, self.tls)
        adapter = replace(adapter, pinned=bool(body.pinned))
        if not await self.registry.write(adapter, replace=bool(body.load_inplace)):
            raise invalid(f"`{body.lora_name}` was loaded at the same time.", "lora_name")
        await self.catalog.read_adapters()
        message = f"The adapter `{adapter.name}` is served."
        return {"message": message, "id": adapter.name, "parent": base, "digest": adapter.digest}

    async def unload(self, body: UnloadBody) -> dict[str, str]:
        """Take an adapter from the list; raises :class:`ApiError`."""
        return await self.remove(body.lora_name, "lora_name")

    async def remove(self, name: str, field: str) -> dict[str, str]:
        """Take an adapter from the list; raises :class:`ApiError` with the field that names it."""
        removed = await self.registry.remove(name)
        await self.catalog.read_adapters()
        if name in self.catalog.adapters():
            raise invalid(f"`{name}` is part of the workers' settings, which decide about it.", field)
        if not removed:
            message = f"The adapter `{name}` does not exist."
            raise ApiError(404, message, "invalid_request_error", field, "model_not_found")
        return {"message": f"The adapter `{name}` is no longer served.", "id": name}

    async def check_deletable(self, name: str, tenant: Tenant) -> None:
        """Raise :class:`ApiError` unless the model is an adapter."""
        check_permission(name, tenant)
        await self.catalog.read_adapters()
        if name in self.catalog.adapters():
            return
        if self.catalog.knows(name) or self.catalog.expects(name):
            message = f"`{name}` is no adapter: it is served while it has workers, and ends with them."
            raise invalid(message, "model", "model_not_deletable")
        raise unknown_model(name, list(self.catalog.listed(tenant.models)))

    def _require_slot(self, base: str, name: str) -> None:
        """Raise :class:`ApiError` if one more pinned adapter would leave no slot for others."""
        slots = self.catalog.adapter_slots(base)
        pinned = sorted(one.name for one in self.catalog.adapters().values() if one.pinned and one.base == base)
        others = [one for one in pinned if one != name]
        if slots and len(others) + 1 >= slots:
            message = f"`pinned`: workers of `{base}` have {slots} slots for adapters, one of which stays for others"
            raise invalid(f"{message}; pinned are {', '.join(others) or 'none'}.", "pinned")

    def _base(self, name: str) -> str:
        """The model that the adapter is for: `name`, or the only one. Raises :class:`ApiError`."""
        models = sorted(self.router.listed.models)
        if not models:
            raise unavailable("no model is being served yet")
        if not name and len(models) > 1:
            raise invalid(f"`base_model_name` must name one of {', '.join(models)}.", "base_model_name")
        if name and name not in models:
            raise invalid(f"`base_model_name`: expected one of {', '.join(models)}.", "base_model_name")
        return name or models[0]


def add_deletion(app: FastAPI, admin: AdapterAdmin) -> None:
    """Add DELETE /v1/models/{name}, OpenAI's way to unload a fine-tuned model."""

    @app.delete("/v1/models/{name:path}", summary="Unload an adapter, such as a fine-tuned model", tags=["models"])
    async def delete(name: str, tenant: CallingTenant) -> dict[str, Any]:
        _require_admin(tenant)
        await admin.check_deletable(name, tenant)
        await admin.remove(name, "model")
        return {"id": name, "object": "model", "deleted": True}


class AdapterHandler(Generic[Body]):
    """Loads or unloads an adapter."""

    def __init__(
        self, kind: type[Body], admin: AdapterAdmin, act: Callable[[AdapterAdmin, Body], Awaitable[dict[str, str]]]
    ) -> None:
        self._admin, self._act = admin, act
        self.decode = BodyDecoder(kind).decode

    async def answer(self, exchange: Exchange, body: Body, request: AdmittedRequest) -> None:
        """See :class:`Handler`."""
        _require_admin(request.tenant)
        try:
            await exchange.send_json(200, await self._act(self._admin, body))
        except RedisAwayError as error:
            raise storage_away("Adapters") from error


def _require_admin(tenant: Tenant) -> None:
    if not tenant.admin:
        raise ApiError(403, "This needs an administrator's key.", "permission_error", code="forbidden")
