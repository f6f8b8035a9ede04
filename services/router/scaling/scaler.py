"""The controller of `autoscaling.mode: builtin`: the leader among the routers sets the replicas of the pools."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from datetime import UTC, datetime

from pydantic import ValidationError

from services.router.api_server import CONFLICT, NOT_FOUND, ApiServer, KubernetesError
from services.router.metrics import RouterMetrics
from services.router.scaling.decision import Demand, History, Reason, ScalingDecision, desired
from services.router.scaling.demand import FleetView
from services.router.scaling.election import Election
from services.router.scaling.peers import DemandByModel, RouterPeers
from services.router.scaling.pools import KEY, ScaledPool, Scaling
from services.router.scaling.replicas import read_scale, write_replicas

EVALUATE_S = 1.0

log = logging.getLogger(__name__)


class Scaler:
    """Evaluates the pools every second, while this router leads."""

    def __init__(
        self, api: ApiServer, election: Election, peers: RouterPeers, view: FleetView, metrics: RouterMetrics
    ) -> None:
        self.scaling = Scaling()
        self._api = api
        self._election = election
        self._peers = peers
        self._view = view
        self._metrics = metrics
        self._histories: dict[str, History] = {}  # by pool
        self._trouble: dict[str, str] = {}  # the last error, by pool; of the lease under ""

    def configure(self, data: Mapping[str, str]) -> None:
        """Replace the pools by those of a ConfigMap; if they cannot be read, the last ones stay."""
        try:
            self.scaling = Scaling.model_validate_json(data.get(KEY, "{}"))
        except ValidationError as error:
            log.warning("the ConfigMap's key %s cannot be read, the scaled pools stay: %s", KEY, error)
            return
        names = {pool.name for pool in self.scaling.builtin}
        self._histories = {name: history for name, history in self._histories.items() if name in names}
        self._metrics.scaler_pools.set(len(names))
        self._metrics.clear_pools()

    def stateful_sets(self, model: str) -> list[str]:
        """The StatefulSets of the scaled pools that serve a model."""
        return [pool.stateful_set for pool in self.scaling.pools if model in pool.models]

    async def run(self) -> None:
        """Evaluate until cancelled, then let another router lead."""
        try:
            while True:
                began = time.monotonic()
                if self.scaling.builtin:
                    await self._campaign()
                    if self._election.leads:
                        await self._evaluate()
                self._metrics.scaler_leads.set(self._election.leads)
                await asyncio.sleep(max(0.0, began + EVALUATE_S - time.monotonic()))
        finally:
            await self._resign()

    async def _campaign(self) -> None:
        led = self._election.leads
        try:
            await self._election.campaign(self.scaling.lease)
            self._trouble.pop("", None)
        except KubernetesError as error:
            hint = "; the chart makes it" if error.status == NOT_FOUND else ""
            self._complain("", f"the lease {self.scaling.lease} cannot be held{hint}: {error}")
        if self._election.leads != led:
            log.info("this router %s the pools", "scales" if self._election.leads else "no longer scales")
            self._histories.clear()  # the next leader has watched for no time
            self._metrics.clear_pools()

    async def _resign(self) -> None:
        try:
            await self._election.resign(self.scaling.lease)
        except KubernetesError as error:
            log.warning("the lease is not given up, the next leader waits for its end: %s", error)

    async def _evaluate(self) -> None:
        held = await self._peers.read()
        await asyncio.gather(*(self._scale(pool, held) for pool in self.scaling.builtin))

    async def _scale(self, pool: ScaledPool, held: DemandByModel) -> None:
        """Evaluate a pool; an error is logged, and the next evaluation tries again."""
        try:
            old = await read_scale(self._api, pool.stateful_set)
            now = time.monotonic()
            demand, capacity = self._view.demand(pool, self.scaling, held), self._view.capacity(pool, old.replicas)
            history = self._histories.get(pool.name) or History.new(now, old.replicas)
            targets = pool.targets(datetime.now(UTC))
            decision, self._histories[pool.name] = desired(now, demand, capacity, targets, history)
            self._metrics.evaluated(pool.name, old.replicas, decision.replicas, decision.load)
            if decision.reason is not Reason.KEEP and self._election.leads:
                await write_replicas(self._api, pool.stateful_set, old, decision.replicas)
                self._metrics.scalings.labels(pool.name, decision.reason.value).inc()
                _log(pool, old.replicas, decision, demand)
            self._trouble.pop(pool.name, None)
        except KubernetesError as error:
            if error.status != CONFLICT:  # it has changed since it was read
                self._complain(pool.name, f"{pool.stateful_set} cannot be scaled: {error}")

    def _complain(self, pool: str, trouble: str) -> None:
        """Log a trouble once, not at each try."""
        self._metrics.scaler_failures.labels(pool).inc()
        if self._trouble.get(pool) != trouble:
            self._trouble[pool] = trouble
            log.warning("%s", trouble)


def _log(pool: ScaledPool, replicas: int, decision: ScalingDecision, demand: Demand) -> None:
    log.info(
        "pool %s: %d replicas instead of %d (%s): %d requests held, %d at workers, demand of %.2f workers",
        pool.name,
        decision.replicas,
        replicas,
        decision.reason.value,
        demand.held,
        demand.busy,
        decision.load,
        extra={"pool": pool.name, "replicas": decision.replicas, "reason": decision.reason.value},
    )
