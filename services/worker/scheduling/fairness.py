"""Fairness between tenants: weighted virtual token counters (Sheng et al., OSDI 2024).

A tenant's counter is the service it got, divided by its weight; the tenant with the lowest counter is admitted
next. A tenant that returns after a pause starts at least at the lowest counter of the active tenants, so that
idle time does not let it starve the others.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from services.worker.scheduling.request import Request

PREFILL_COST = 1.0
CACHED_COST = 0.1
OUTPUT_COST = 2.0  # a decoded token occupies a row of a whole step

_REMEMBERED = 4096  # idle tenants whose counter is kept


@dataclass(slots=True)
class _Account:
    served: float = 0.0
    weight: int = 1
    requests: int = 0


class TenantLedger:
    """Counters of all tenants with a request waiting or running."""

    def __init__(self) -> None:
        self._active: dict[str, _Account] = {}
        self._idle: OrderedDict[str, _Account] = OrderedDict()

    def enter(self, tenant: str, weight: int) -> None:
        """Add one request of `tenant`; the newest weight applies."""
        account = self._active.get(tenant)
        if account is None:
            account = self._idle.pop(tenant, None) or _Account()
            floor = min((other.served for other in self._active.values()), default=0.0)
            account.served = max(account.served, floor)
            self._active[tenant] = account
        account.weight = max(1, weight)
        account.requests += 1

    def leave(self, tenant: str) -> None:
        """Remove one request of `tenant`."""
        account = self._active[tenant]
        account.requests -= 1
        if account.requests == 0:
            self._idle[tenant] = self._active.pop(tenant)
            if len(self._idle) > _REMEMBERED:
                self._idle.popitem(last=False)

    def charge(self, tenant: str, cost: float) -> None:
        """Add `cost`, divided by the weight, to an active tenant's counter."""
        account = self._active[tenant]
        account.served += cost / account.weight

    def charge_load(self, tenant: str, cost: float) -> None:
        """Charge for what a tenant had loaded, unless all of its requests have ended meanwhile."""
        if tenant in self._active:
            self.charge(tenant, cost)

    def charge_known(self, request: Request, start: int, end: int, cost: float) -> None:
        """Charge positions [start, end) of a request's known tokens at `cost` each; no position is charged twice."""
        if end > request.n_charged:
            self.charge(request.tenant, cost * (end - max(start, request.n_charged)))
            request.n_charged = end

    def served(self, tenant: str) -> float:
        """The counter of an active tenant."""
        return self._active[tenant].served

    def __len__(self) -> int:
        return len(self._active)
