"""The entrance of all requests, from each API."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from services.gateway.api.ignored import Ignored
from services.gateway.billing.meter import Meter
from services.gateway.generation.admitted import AdmittedRequest
from services.gateway.generation.models import Models
from services.gateway.generation.waiting import PatienceLimits
from services.gateway.tenants.tenant import Gate, Tenant


@dataclass(frozen=True, slots=True)
class Entrance:
    """The gate, and the models behind it."""

    gate: Gate
    models: Models
    meter: Meter
    refuse_fields: bool = False  # that no API knows; else they are ignored
    time_limit_s: float = 0.0  # limit of a request's total time; 0: none
    patience: PatienceLimits = field(default_factory=PatienceLimits)

    def admit(self, tenant: Tenant, patience: str = "") -> AdmittedRequest:
        """Return a new request of a tenant; :class:`AdmittedRequest` enters the gate.

        `patience`: its client's header; raises :class:`ApiError` (400) for a wrong one.
        """
        return AdmittedRequest(
            self.gate,
            self.models,
            self.meter,
            tenant,
            Ignored(self.refuse_fields),
            self.patience.begin(patience, asyncio.get_running_loop().time()),
            self.time_limit_s,
        )
