"""Tenants and their limits."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Protocol

import msgspec

from services.common.adapters import MAX_NAME, check_name
from services.common.worker_options import MAX_WEIGHT
from services.gateway.tenants.hours import Hours
from services.gateway.usage import Usage


class Tenant(msgspec.Struct, frozen=True, kw_only=True):
    """A tenant. In every limit, zero means unlimited."""

    name: str = ""  # empty only when tenancy is off
    models: tuple[str, ...] = ()  # empty: all
    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    tokens_per_month: int = 0
    budget_per_month: float = 0.0  # cost of its requests, in the currency of the prices
    max_concurrent: int = 0
    priority: int = 0  # the default of its requests, and the lowest (best) value that they may ask for
    weight: int = 0
    admin: bool = False
    hours: Hours | None = None  # when new requests are admitted; None: always

    @property
    def key_id(self) -> str:
        """The name of its key in reports; empty for a tenant without a key."""
        return ""


Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]  # Redis counts in doubles


class TenantLimits(Tenant, frozen=True, kw_only=True):
    """The limits of a tenant as operators write them, each within its range."""

    models: tuple[Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME)], ...] = ()
    requests_per_minute: Count = 0
    tokens_per_minute: Count = 0
    tokens_per_month: Count = 0
    budget_per_month: Annotated[float, msgspec.Meta(ge=0, le=1e9)] = 0.0
    max_concurrent: Count = 0
    priority: Annotated[int, msgspec.Meta(ge=-100, le=100)] = 0
    weight: Annotated[int, msgspec.Meta(ge=0, le=MAX_WEIGHT)] = 0

    def __post_init__(self) -> None:
        for model in self.models:
            check_name(model)


class Permit(Protocol):
    """The admission of a request."""

    headers: list[tuple[bytes, bytes]]  # x-ratelimit-*

    async def reserve(self, tokens: int) -> None:
        """Reserve the tokens of the whole request, once counted; raises :class:`ApiError` 429."""

    async def settle(self, usage: Usage) -> None:
        """End the request and return unused tokens; called exactly once."""


class Gate(Protocol):
    """Admits requests."""

    async def identify(self, authorization: str) -> Tenant:
        """The tenant of an Authorization header; raises :class:`ApiError` 401."""

    async def credential(self, authorization: str) -> str:
        """A storable credential from an Authorization header, to act for the tenant later."""

    async def of_credential(self, credential: str) -> Tenant:
        """The tenant of a stored credential; raises :class:`ApiError` 401 when the key was removed."""

    async def enter(self, tenant: Tenant) -> Permit:
        """Admit a request before any work that grows with its size; raises :class:`ApiError` 429."""


@dataclass(slots=True)
class _Unlimited:
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)

    async def reserve(self, tokens: int) -> None:
        """Do nothing: there are no limits."""

    async def settle(self, usage: Usage) -> None:
        """Do nothing: nothing was reserved."""


class OpenGate:
    """The gate without tenancy: all callers are one tenant without name and limits."""

    def __init__(self) -> None:
        self._tenant = Tenant(admin=True)
        self._admission = _Unlimited()

    async def identify(self, authorization: str) -> Tenant:
        """See :class:`Gate`."""
        return self._tenant

    async def credential(self, authorization: str) -> str:
        """See :class:`Gate`."""
        return ""

    async def of_credential(self, credential: str) -> Tenant:
        """See :class:`Gate`."""
        return self._tenant

    async def enter(self, tenant: Tenant) -> Permit:
        """See :class:`Gate`."""
        return self._admission
