"""Admission for the requests of batches: by stored credential, with a lower priority than all other requests."""

from __future__ import annotations

import msgspec

from services.gateway.generation.request import LAST_PRIORITY
from services.gateway.tenants.tenant import Gate, Permit, Tenant


class BatchGate:
    """A :class:`Gate` in front of another one. Its Authorization header holds a stored credential."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    async def credential(self, authorization: str) -> str:
        """See :class:`Gate`."""
        return authorization

    async def of_credential(self, credential: str) -> Tenant:
        """See :class:`Gate`."""
        tenant = await self._gate.of_credential(credential)
        return msgspec.structs.replace(tenant, priority=max(LAST_PRIORITY, tenant.priority))

    async def identify(self, authorization: str) -> Tenant:
        """See :class:`Gate`."""
        return await self.of_credential(authorization)

    async def enter(self, tenant: Tenant) -> Permit:
        """See :class:`Gate`."""
        return await self._gate.enter(tenant)
