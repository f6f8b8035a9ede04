"""Where every request comes in, whichever API it took."""

from __future__ import annotations

from dataclasses import dataclass

from services.gateway.api.schema import MAX_SESSION_CHARS
from services.gateway.errors import invalid
from services.gateway.generation.models import Models
from services.gateway.generation.request import Caller
from services.gateway.tenants.tenant import Gate, Permit, Tenant
from services.gateway.text.codec import ServedModel
from services.gateway.usage import Usage

_NOTHING = Usage()


def named_session(value: str) -> str:
    """The session of a header `x-session-id`; raises :class:`ApiError` (400)."""
    if len(value) > MAX_SESSION_CHARS:
        message = f"`x-session-id` may have at most {MAX_SESSION_CHARS} characters, got {len(value)}."
        raise invalid(message, "x-session-id")
    return value


@dataclass(frozen=True, slots=True)
class Entrance:
    """Who may come in, and the models there are for him."""

    gate: Gate
    models: Models

    def admit(self, tenant: Tenant) -> AdmittedRequest:
        """A request of a tenant, who was identified before the request was read; see there."""
        return AdmittedRequest(self, tenant)


class AdmittedRequest:
    """Let in when its block begins, before anything is done that grows with its size; settled when the block ends.

    Entering the block raises :class:`ApiError` (429).
    """

    __slots__ = ("_gate", "admission", "models", "tenant", "used")

    admission: Permit

    def __init__(self, entrance: Entrance, tenant: Tenant) -> None:
        self._gate = entrance.gate
        self.models = entrance.models
        self.tenant = tenant
        self.used = _NOTHING

    async def __aenter__(self) -> AdmittedRequest:
        self.admission = await self._gate.enter(self.tenant)
        return self

    async def __aexit__(self, *_failure: object) -> None:
        await self.admission.settle(self.used)

    async def model(self, name: str | None) -> ServedModel:
        """The model that a body names; raises :class:`ApiError` when there is none that the tenant may use."""
        return await self.models.find(name or "", self.tenant)

    def caller(self, session: str, priority: int | None, traceparent: str) -> Caller:
        """On whose behalf it runs; nobody gets a better priority than the tenant's own."""
        tenant = self.tenant
        effective = tenant.priority if priority is None else max(priority, tenant.priority)
        return Caller(tenant.name, effective, tenant.weight, session, traceparent)
