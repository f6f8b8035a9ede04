"""Admission for requests that the gateway sends itself: by stored credential."""

from __future__ import annotations

import msgspec

from services.gateway.tenants.tenant import Gate, Permit, Tenant

_BEST = -100


class StoredCredentials:
    """A :class:`Gate` in front of another one. Its Authorization header holds a stored credential."""

    def __init__(self, gate: Gate, priority: int = _BEST) -> None:
        """`priority`: the best one that its requests get."""
        self._gate = gate
        self._priority = priority

    async def credential(self, authorization: str) -> str:
        """See :class:`Gate`."""
        return authorization

    async def of_credential(self, credential: str) -> Tenant:
        """See :class:`Gate`."""
        tenant = await self._gate.of_credential(credential)
        return msgspec.structs.replace(tenant, priority=max(self._priority, tenant.priority))

    async def identify(self, authorization: str) -> Tenant:
        """See :class:`Gate`."""
        return await self.of_credential(authorization)

    async def enter(self, tenant: Tenant) -> Permit:
        """See :class:`Gate`."""
        return await self._gate.enter(tenant)
