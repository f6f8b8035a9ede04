"""Finds the tenant that calls one of the app's routes, by its key."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Request

from services.gateway.asgi import authorization, headers_of
from services.gateway.tenants.tenant import Gate, Tenant


async def _tenant(request: Request) -> Tenant:
    gate: Gate = request.app.state.gate
    return await gate.identify(authorization(headers_of(request.scope)))


CallingTenant = Annotated[Tenant, Depends(_tenant)]
