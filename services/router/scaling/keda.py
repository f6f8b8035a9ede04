"""KEDA's external scaler: routers report the demand for a pool to KEDA, so that no scrape delays it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import UTC, datetime

import grpc
import grpc.aio
from ryzanstein.keda import externalscaler_pb2 as pb
from ryzanstein.keda import externalscaler_pb2_grpc

from services.router.metrics import RouterMetrics
from services.router.scaling.decision import Demand, load
from services.router.scaling.demand import FleetView
from services.router.scaling.peers import RouterPeers
from services.router.scaling.pools import ScaledPool
from services.router.scaling.scaler import Scaler

# The metric is the demand in hundredths of a worker: KEDA's metrics are whole numbers.
METRIC, ONE_WORKER = "demand", 100
# A pool is active for this long after a request, so that KEDA's polls see short ones.
RECENT_S = 30.0
LOOK_EVERY_S = 0.5

Context = grpc.aio.ServicerContext[object, object]


@dataclass(frozen=True, slots=True)
class _PoolDemand:
    """A pool and its demand now."""

    pool: ScaledPool
    demand: Demand

    @property
    def active(self) -> bool:
        return self.demand.requests > 0 or self.demand.idle_s < RECENT_S


class KedaScaler(externalscaler_pb2_grpc.ExternalScalerServicer):
    """`externalscaler.ExternalScaler`; any router answers for all."""

    def __init__(self, scaler: Scaler, peers: RouterPeers, view: FleetView, metrics: RouterMetrics) -> None:
        self._scaler = scaler
        self._peers = peers
        self._view = view
        self._metrics = metrics

    async def IsActive(self, request: pb.ScaledObjectRef, context: Context) -> pb.IsActiveResponse:  # noqa: N802
        """Whether there are requests, or were until recently."""
        return pb.IsActiveResponse(result=(await self._ask(request, context)).active)

    async def StreamIsActive(  # noqa: N802
        self, request: pb.ScaledObjectRef, context: Context
    ) -> AsyncIterator[pb.IsActiveResponse]:
        """The same, now and after each change."""
        last: bool | None = None
        while True:
            active = (await self._ask(request, context)).active
            if active is not last:
                yield pb.IsActiveResponse(result=active)
                last = active
            await asyncio.sleep(LOOK_EVERY_S)

    async def GetMetricSpec(  # noqa: N802
        self, request: pb.ScaledObjectRef, context: Context
    ) -> pb.GetMetricSpecResponse:
        """One metric, of which each worker takes `ONE_WORKER`."""
        await self._pool(request, context)
        return pb.GetMetricSpecResponse(metricSpecs=[pb.MetricSpec(metricName=METRIC, targetSize=ONE_WORKER)])

    async def GetMetrics(self, request: pb.GetMetricsRequest, context: Context) -> pb.GetMetricsResponse:  # noqa: N802
        """The demand now."""
        current = await self._ask(request.scaledObjectRef, context)
        workers, _ = load(current.demand, self._view.capacity(current.pool, 0), current.pool.targets(datetime.now(UTC)))
        self._metrics.pool_load.labels(current.pool.name).set(workers)
        value = pb.MetricValue(metricName=METRIC, metricValue=math.ceil(workers * ONE_WORKER))
        return pb.GetMetricsResponse(metricValues=[value])

    async def _ask(self, request: pb.ScaledObjectRef, context: Context) -> _PoolDemand:
        pool = await self._pool(request, context)
        held = await self._peers.read()
        demand = self._view.demand(pool, self._scaler.scaling, held)
        if not demand.complete and not demand.requests:
            # KEDA keeps the replicas after an error; an incomplete sum might let it remove workers.
            await context.abort(grpc.StatusCode.UNAVAILABLE, "a router or a worker does not answer")
        return _PoolDemand(pool, demand)

    async def _pool(self, request: pb.ScaledObjectRef, context: Context) -> ScaledPool:
        name = request.scalerMetadata.get("pool", "")
        pool = self._scaler.scaling.find(name)
        if pool is None:
            known = ", ".join(sorted(each.name for each in self._scaler.scaling.pools)) or "none"
            await context.abort(
                grpc.StatusCode.NOT_FOUND, f"scalerMetadata.pool: {name!r} is not scaled; pools are {known}"
            )
        return pool
