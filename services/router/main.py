"""Starts the router: builds its parts from the settings and runs them until it is asked to stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine
from pathlib import Path

import redis.asyncio as redis
from ryzanstein.keda import externalscaler_pb2, externalscaler_pb2_grpc
from ryzanstein.v1 import routing_pb2, routing_pb2_grpc

from services.common.heap import FleetHeap, freeze_started
from services.common.keys import RedisKeys
from services.common.leases import READ_TIMEOUT_S, LeaseWatcher
from services.common.lifecycle import run_service
from services.common.metrics import new_registry, serve_metrics
from services.common.redis_client import open_redis
from services.common.router_addresses import RouterAddresses
from services.common.rpc import Health, bind, new_server, open_channel
from services.common.tasks import retried, running_loops
from services.common.tls.credentials import export_end
from services.common.tracing import tracing
from services.common.worker_watcher import WorkerHooks, WorkerWatcher
from services.router.api_server import ApiServer
from services.router.breaker import BreakerLimits
from services.router.expected_models import ConfigMap, ConfigMapWatch, Data, names_of
from services.router.fleet import Fleet
from services.router.metrics import RouterMetrics
from services.router.policies import make_policy
from services.router.prefixes import Prefixes
from services.router.residency import Residency
from services.router.routing import Routing
from services.router.scaling.arrivals import Arrivals
from services.router.scaling.demand import FleetView
from services.router.scaling.election import Election
from services.router.scaling.keda import KedaScaler
from services.router.scaling.peers import RouterPeers
from services.router.scaling.scaler import Scaler
from services.router.service import RouterService
from services.router.sessions import Sessions
from services.router.settings import RouterSettings
from services.router.start_history import StartHistory
from services.router.start_reports import StartReports
from services.router.stored_models import StoredModels
from services.router.waking import Waking

SERVICES = [
    routing_pb2.DESCRIPTOR.services_by_name["Router"].full_name,
    externalscaler_pb2.DESCRIPTOR.services_by_name["ExternalScaler"].full_name,
]
# Waiting requests are tried again after a change, with a pause so that a burst of changes causes one try; and at a
# fixed interval, since breakers change with time alone.
DRAIN_PAUSE_S, DRAIN_EVERY_S = 0.005, 0.1
REFRESH_S = 0.5
# Starts of models are measured, and sleeping workers woken, at this interval.
STARTS_S = 0.1
# Grace for running decisions when the server stops; streams are cancelled at once.
STOP_GRACE_S = 2.0
# The router starts to answer after this time, even if it could not read Redis; as long again for the expected models.
# Until then gateways choose workers.
FIRST_READ_S = 5.0

log = logging.getLogger(__name__)


async def _drain_queues(routing: Routing, changed: asyncio.Event) -> None:
    while True:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_EVERY_S):
                await changed.wait()
        changed.clear()
        routing.drain_queues()
        await asyncio.sleep(DRAIN_PAUSE_S)


async def _follow_starts(routing: Routing, waking: Waking) -> None:
    while True:
        routing.observe_starts()
        waking.wake(routing.wanted())
        await asyncio.sleep(STARTS_S)


def _expect_models(
    settings: RouterSettings,
    api: ApiServer,
    fleet: Fleet,
    scaler: Scaler,
    client: redis.Redis,
    keys: RedisKeys,
) -> tuple[asyncio.Event, list[Coroutine[None, None, None]]]:
    """Tell the fleet which models are expected, and the scaler its pools.

    Returns an event that is set once the fleet knows, and the loops that keep it informed.
    """
    read = asyncio.Event()

    def expect(models: frozenset[str]) -> None:
        fleet.expect(models)
        read.set()

    def changed(data: Data) -> None:
        scaler.configure(data)
        expect(names_of(data))

    if settings.expected_models_config_map:
        ConfigMapWatch(ConfigMap(settings.expected_models_config_map, api), changed).start()
    elif settings.expected_models:
        expect(frozenset(settings.expected_models))
    else:
        return read, [StoredModels(client, keys, settings.redis, expect).run()]
    return read, []


async def serve(settings: RouterSettings, stop: asyncio.Event) -> None:
    """Run the router until `stop`; raises OSError when a port is taken."""
    tls = settings.open_tls()
    keys, registry, changed = RedisKeys(settings.namespace), new_registry("router"), asyncio.Event()
    lease_redis = open_redis(settings.redis, READ_TIMEOUT_S)
    session_redis = open_redis(settings.redis, settings.redis_timeout_ms / 1000, timed_by_caller=True)

    def fleet_changed() -> None:
        residency.changed()
        if routing.anybody_waits:
            changed.set()

    fleet = Fleet(settings.router_id, settings.saturation_s, BreakerLimits(), fleet_changed, tls)
    residency = Residency(fleet, tls)
    workers = WorkerWatcher(
        LeaseWatcher(lease_redis, keys, settings.redis),
        WorkerHooks(fleet.follow, connected=fleet.connected, lost=fleet.lost),
    )

    def waits_for() -> str:
        return "" if fleet.has_live_workers() else workers.waits_for

    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(tracing("router", settings.router_id))
        stack.push_async_callback(lease_redis.aclose)
        stack.push_async_callback(session_redis.aclose)
        prefixes = []
        for address in settings.coordinator_address:
            channel = await stack.enter_async_context(
                open_channel(address, to="coordinator", tls=tls, small_messages=True)
            )
            prefixes.append(Prefixes(channel, settings.lookup_timeout_ms / 1000))
            stack.push_async_callback(prefixes[-1].close)
        metrics = RouterMetrics(registry, prefixes)
        export_end(registry, tls)
        arrivals, api = Arrivals(settings.router_id), ApiServer(Path(settings.service_account_folder))
        peers = RouterPeers(RouterAddresses(settings.router_peers), settings.router_id, fleet, arrivals, tls)
        stack.push_async_callback(peers.close)
        view = FleetView(fleet, lambda: not workers.waits_for)
        scaler = Scaler(api, Election(api, settings.router_id), peers, view, metrics)
        models_read, follow_models = _expect_models(settings, api, fleet, scaler, lease_redis, keys)
        sessions = Sessions(
            session_redis, keys, settings.redis, settings.redis_timeout_ms / 1000, metrics.redis_seconds.observe
        )
        routing = Routing(
            fleet=fleet,
            policy=make_policy(settings.policy),
            sessions=sessions,
            prefixes=prefixes,
            queue_size=settings.queue_size,
            queue_timeout_s=settings.queue_timeout_s,
        )
        reports = StartReports(
            lease_redis, keys, settings.redis, routing.starts, lambda: [model for model, _ in routing.starting()]
        )
        waking = Waking(residency)
        stack.push_async_callback(waking.close)
        server = new_server(tls=tls)
        service = RouterService(settings, fleet, routing, metrics, residency, arrivals, tls)
        routing_pb2_grpc.add_RouterServicer_to_server(service, server)
        keda = KedaScaler(scaler, peers, view, metrics)
        externalscaler_pb2_grpc.add_ExternalScalerServicer_to_server(keda, server)
        health = Health(server, SERVICES)
        await health.set_serving(False)
        port = bind(server, settings.host, settings.router_port, tls)
        stack.enter_context(serve_metrics(settings.host, settings.metrics_port, registry, waits_for))
        heap = FleetHeap()
        freeze_started()

        async def refresh() -> None:
            while True:
                await health.set_serving(not waits_for())
                sessions.connect()
                for coordinator in prefixes:
                    coordinator.connect()
                gone = fleet.forget([pool.model for pool in routing.wanted()])
                routing.forget(gone)
                arrivals.forget(gone)
                metrics.refresh(fleet, routing)
                heap.freeze_if_still(workers.joined, workers.left)
                await asyncio.sleep(REFRESH_S)

        async with running_loops(
            stop,
            workers.run(),
            _drain_queues(routing, changed),
            _follow_starts(routing, waking),
            refresh(),
            residency.run(),
            scaler.run(),
            *follow_models,
            retried(lambda: reports.run(api, scaler.stateful_sets)),
            retried(StartHistory(lease_redis, keys, settings.redis, routing.starts, lambda: fleet.pools).run),
        ):
            # A router that answered before it knows the workers would refuse requests that they could serve.
            await workers.wait_read(FIRST_READ_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FIRST_READ_S):
                    await models_read.wait()
            await server.start()
            stack.push_async_callback(server.stop, STOP_GRACE_S)
            log.info("router listens", extra={"port": port, "address": settings.advertised(port)})
            await stop.wait()


def main() -> None:
    """Entry point of the process."""
    run_service("router", RouterSettings, serve)
