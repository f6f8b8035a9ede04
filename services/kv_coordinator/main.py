"""Starts the coordinator: builds its parts from the settings and runs them until it is asked to stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging

from ryzanstein.v1 import kv_pb2, kv_pb2_grpc

from services.common.heap import FleetHeap, freeze_started
from services.common.keys import RedisKeys
from services.common.leases import READ_TIMEOUT_S, LeaseWatcher
from services.common.lifecycle import run_service
from services.common.metrics import new_registry, serve_metrics
from services.common.redis_client import open_redis
from services.common.rpc import Health, bind, new_server
from services.common.tasks import running_loops
from services.common.tls.credentials import export_end
from services.common.tracing import tracing
from services.common.worker_watcher import WorkerHooks, WorkerWatcher
from services.kv_coordinator.hot import HotPrefixes, Pins
from services.kv_coordinator.index import BlockIndex
from services.kv_coordinator.metrics import CoordinatorMetrics
from services.kv_coordinator.service import CoordinatorService
from services.kv_coordinator.settings import CoordinatorSettings
from services.kv_coordinator.subscriptions import Subscriptions, SyncCounters

SERVICE = kv_pb2.DESCRIPTOR.services_by_name["KvCoordinator"].full_name
# A sweep alternates with events and look-ups, in slices short enough not to delay them noticeably.
SWEEP_SLICE_S = 0.001
REFRESH_S = 1.0
HOT_PREFIXES = 1024  # counted at a time, about 100 bytes each
MAX_PINS = 10_000  # pinned prefixes at a time
# A short grace: a look-up takes milliseconds, but routers never end their calls.
STOP_GRACE_S = 0.2

log = logging.getLogger(__name__)


async def _sweep(index: BlockIndex) -> None:
    while True:
        await asyncio.sleep(REFRESH_S)
        if index.needs_sweep():
            for _ in index.sweep(SWEEP_SLICE_S):
                await asyncio.sleep(SWEEP_SLICE_S)


async def serve(settings: CoordinatorSettings, stop: asyncio.Event) -> None:
    """Run the coordinator until `stop`; raises OSError when a port is taken."""
    index, counters, registry = BlockIndex(), SyncCounters(), new_registry("kv-coordinator")
    tls = settings.open_tls()
    subscriptions = Subscriptions(index, counters, tls)
    redis = open_redis(settings.redis, READ_TIMEOUT_S)
    workers = WorkerWatcher(
        LeaseWatcher(redis, RedisKeys(settings.namespace), settings.redis),
        WorkerHooks(subscriptions.follow, subscriptions.connected, subscriptions.lost, settings.follows),
    )
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(tracing("kv-coordinator"))  # before any part gets a tracer
        stack.push_async_callback(redis.aclose)
        metrics = CoordinatorMetrics(registry, counters)
        export_end(registry, tls)
        service = CoordinatorService(index, subscriptions, counters, HotPrefixes(HOT_PREFIXES), Pins(MAX_PINS), metrics)
        server = new_server(tls=tls)
        kv_pb2_grpc.add_KvCoordinatorServicer_to_server(service, server)
        health = Health(server, [SERVICE])
        await health.set_serving(False)
        port = bind(server, settings.host, settings.coordinator_port, tls)
        stack.enter_context(serve_metrics(settings.host, settings.metrics_port, registry, lambda: workers.waits_for))
        await server.start()
        stack.push_async_callback(server.stop, STOP_GRACE_S)
        log.info("coordinator listens", extra={"port": port, "address": settings.advertised(port)})

        heap = FleetHeap()
        freeze_started()

        async def become_ready() -> None:
            """Serve from the first read of the leases on, and stay ready.

            Before it, an empty index may mean a wrong password for Redis; later, "unknown" is a correct answer.
            """
            await workers.read.wait()
            await health.set_serving(True)
            await stop.wait()

        async def refresh() -> None:
            while True:
                metrics.refresh(index, subscriptions)
                heap.freeze_if_still(workers.joined, workers.left)
                await asyncio.sleep(REFRESH_S)

        async with running_loops(stop, workers.run(), become_ready(), _sweep(index), refresh()):
            await stop.wait()


def main() -> None:
    """Entry point of the process."""
    run_service("kv-coordinator", CoordinatorSettings, serve)
