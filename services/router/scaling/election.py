"""One leader among the routers, by a Lease of Kubernetes' API (coordination.k8s.io) that the chart has made."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from datetime import UTC, datetime

from services.router.api_server import CONFLICT, ApiServer, KubernetesError, Object

LEASE_S = 6
RENEW_S = 2.0
# A leader stops to act this long before others may take its place.
_MARGIN_S = 1.5
TIMEOUT_S = 2.0


class Election:
    """This router's part.

    A lease is over when its record has not changed for its duration by this router's own clock: clocks of different
    machines are not compared.
    """

    def __init__(self, api: ApiServer, identity: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._api = api
        self._identity = identity
        self._clock = clock
        self._leads_until = self._renew_at = 0.0
        self._record: tuple[object, ...] = ()
        self._record_seen_at = 0.0

    @property
    def leads(self) -> bool:
        """Whether this router is the leader now."""
        return self._clock() < self._leads_until

    async def campaign(self, lease: str) -> None:
        """Renew the lease, or take a free one. Raises KubernetesError; a leader then leads until its lease ends."""
        if self._clock() >= self._renew_at:
            await asyncio.to_thread(self._campaign, lease)

    def _campaign(self, lease: str) -> None:
        began = self._clock()
        current = self._read(lease)
        spec = current.get("spec") or {}
        holder = spec.get("holderIdentity") or ""
        record = (holder, spec.get("renewTime"), spec.get("leaseTransitions"))
        if record != self._record:
            self._record, self._record_seen_at = record, began
        free = not holder or began >= self._record_seen_at + (spec.get("leaseDurationSeconds") or LEASE_S)
        if holder != self._identity and not free:
            self._leads_until, self._renew_at = 0.0, began + RENEW_S
            return
        if self._write(lease, current, self._taken(spec, holder)):
            self._leads_until, self._renew_at = began + LEASE_S - _MARGIN_S, began + RENEW_S
        else:
            self._leads_until = 0.0

    async def resign(self, lease: str) -> None:
        """Give the lease up, so that another router need not wait for its end. Raises KubernetesError."""
        if self.leads:
            self._leads_until = 0.0
            await asyncio.to_thread(self._resign, lease)

    def _resign(self, lease: str) -> None:
        current = self._read(lease)
        spec = current.get("spec") or {}
        if spec.get("holderIdentity") == self._identity:
            self._write(lease, current, {**spec, "holderIdentity": ""})

    def _taken(self, spec: Object, holder: str) -> Object:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        mine = {**spec, "holderIdentity": self._identity, "leaseDurationSeconds": LEASE_S, "renewTime": now}
        if holder != self._identity:
            mine |= {"acquireTime": now, "leaseTransitions": (spec.get("leaseTransitions") or 0) + 1}
        return mine

    def _read(self, lease: str) -> Object:
        return self._api.call("GET", _path(lease), timeout_s=TIMEOUT_S)

    def _write(self, lease: str, current: Object, spec: Object) -> bool:
        """Replace the spec; return False if the lease has changed meanwhile."""
        try:
            self._api.call("PUT", _path(lease), {**current, "spec": spec}, timeout_s=TIMEOUT_S)
        except KubernetesError as error:
            if error.status == CONFLICT:
                return False
            raise
        return True


def _path(lease: str) -> str:
    return f"/apis/coordination.k8s.io/v1/namespaces/{{namespace}}/leases/{lease}"
