"""The entrance of all requests, from each API."""

from __future__ import annotations

from dataclasses import dataclass

from services.gateway.api.ignored import Ignored
from services.gateway.billing.meter import Meter
from services.gateway.generation.admitted import AdmittedRequest
from services.gateway.generation.models import Models
from services.gateway.tenants.tenant import Gate, Tenant


@dataclass(frozen=True, slots=True)
class Entrance:
    """The gate, and the models behind it."""

    gate: Gate
    models: Models
    meter: Meter
    refuse_fields: bool = False  # that no API knows; else they are ignored
    time_limit_s: float = 0.0  # limit of a request's total time; 0: none

    def admit(self, tenant: Tenant) -> AdmittedRequest:
        """Return a new request of a tenant; :class:`AdmittedRequest` enters the gate."""
        return AdmittedRequest(
            self.gate, self.models, self.meter, tenant, Ignored(self.refuse_fields), self.time_limit_s
        )
