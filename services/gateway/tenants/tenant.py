"""Who is calling, and what the caller may use."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from services.gateway.usage import Usage


class Tenant(msgspec.Struct, frozen=True, kw_only=True):
    """A customer. Zero means unlimited everywhere."""

    name: str = ""  # of a tenant from a key store: never empty
    models: tuple[str, ...] = ()  # empty: all
    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    tokens_per_month: int = 0
    max_concurrent: int = 0
    priority: int = 0  # the best (lowest) that its requests may ask for, and what they get by default
    weight: int = 0
    admin: bool = False


class Permit(Protocol):
    """A request that was let in."""

    headers: list[tuple[bytes, bytes]]  # x-ratelimit-*

    async def reserve(self, tokens: int) -> None:
        """Reserve that many tokens for the whole request, once they are known; raises :class:`ApiError` 429."""

    async def settle(self, usage: Usage) -> None:
        """The request is over: give back what was reserved and not used. To be called exactly once."""


class Gate(Protocol):
    """Decides who may do what."""

    async def identify(self, authorization: str) -> Tenant:
        """The tenant of an Authorization header; raises :class:`ApiError` 401."""

    def credential(self, authorization: str) -> str:
        """What may be stored of an Authorization header, to act for the caller later."""

    async def of_credential(self, credential: str) -> Tenant:
        """The tenant of what was stored; raises :class:`ApiError` 401 when the key has been taken away."""

    async def enter(self, tenant: Tenant) -> Permit:
        """Let a request in before anything is done that grows with its size; raises :class:`ApiError` 429."""


@dataclass(slots=True)
class _Unlimited:
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)

    async def reserve(self, tokens: int) -> None:
        """Nothing is limited."""

    async def settle(self, usage: Usage) -> None:
        """Nothing was reserved."""


class OpenGate:
    """Everybody is the same nameless tenant without limits: tenancy is off."""

    def __init__(self) -> None:
        self._tenant = Tenant(admin=True)
        self._admission = _Unlimited()

    async def identify(self, authorization: str) -> Tenant:
        """See :class:`Gate`."""
        return self._tenant

    def credential(self, authorization: str) -> str:
        """See :class:`Gate`."""
        return ""

    async def of_credential(self, credential: str) -> Tenant:
        """See :class:`Gate`."""
        return self._tenant

    async def enter(self, tenant: Tenant) -> Permit:
        """See :class:`Gate`."""
        return self._admission
