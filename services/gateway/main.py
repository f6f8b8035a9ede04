"""Runs the gateway."""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import partial

from services.common.heap import freeze_started
from services.common.keys import RedisKeys
from services.common.lifecycle import run_service
from services.common.metrics import serve_metrics
from services.common.redis_client import open_redis
from services.common.tasks import retried, running_loops
from services.common.tls.credentials import export_end
from services.common.tracing import tracing
from services.gateway.batches.module import Batches
from services.gateway.drain import LAST_WORDS_S, Drain, DrainPhase
from services.gateway.fine_tuning.module import FineTuning
from services.gateway.generation.adapters import AdapterRegistry
from services.gateway.generation.attempt import Cause
from services.gateway.generation.budget import ResumeBudget
from services.gateway.generation.cards import CardStore
from services.gateway.generation.pipeline import Pipeline
from services.gateway.generation.resume import Upstream
from services.gateway.grammar.admission import GrammarCompiler
from services.gateway.grpc.server import GrpcServer, serving_grpc
from services.gateway.http.adapters import AdapterAdmin
from services.gateway.http.admin import serving_admin
from services.gateway.http.server import HttpServer, serving_http
from services.gateway.names.canaries import Canaries
from services.gateway.names.registry import RouteRegistry
from services.gateway.names.table import RouteTable
from services.gateway.responses.module import background_claims
from services.gateway.settings import GatewaySettings
from services.gateway.spans import RequestTracer
from services.gateway.telemetry import GatewayMetrics
from services.gateway.tenants.key_registry import KeyRegistry
from services.gateway.tenants.peers import Peers
from services.gateway.tenants.redis_guard import RedisGuard
from services.gateway.upstream.catalog import Catalog
from services.gateway.upstream.connection import WorkerPool
from services.gateway.websocket.replay import ReplayBuffers
from services.gateway.wiring import (
    STORE_S,
    SharedServices,
    kept_responses,
    new_directory,
    new_gate,
    new_ledger,
    new_reports,
    new_request_log,
    new_router,
    response_cache,
    resume_policy,
)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Gateway:
    """A running gateway."""

    http: HttpServer
    grpc: GrpcServer
    admin: HttpServer | None
    catalog: Catalog
    metrics: GatewayMetrics
    drain: Drain
    buffers: ReplayBuffers
    settings: GatewaySettings

    @property
    def waits_for(self) -> str:
        """Why the gateway is not ready; empty when it is."""
        if self.drain.draining:
            return "draining"
        return "" if self.catalog.ready else "no router, or no worker of those that serve, has answered yet"

    @property
    def ready(self) -> bool:
        """Whether the gateway is ready for traffic."""
        return not self.waits_for

    async def _announce(self, phase: DrainPhase) -> None:
        """Begin a phase of the shutdown, and announce it on all connections."""
        self.drain.enter(phase)
        self.http.announce_close()
        await self.grpc.announce_end()

    async def leave(self) -> None:
        """Stop being ready, but listen until load balancers have noticed.

        New requests prolong this by at most half of the drain's time-out; the other half stays for the last request.
        """
        settings, loop = self.settings, asyncio.get_running_loop()
        since = loop.time()
        await self._announce(DrainPhase.DRAINING)
        await asyncio.sleep(settings.drain_delay_s)
        await self.drain.silence(settings.drain_silence_s, settings.drain_timeout_s / 2)
        log.info(
            "it stops listening, %.1f s after it said that it is not ready; the last new request came after %.1f s",
            loop.time() - since,
            self.drain.last_arrival_s,
        )

    async def end(self, timeout_s: float) -> None:
        """Drain all APIs side by side, under one deadline; returns when nothing is open."""
        if self.drain.closing:
            return
        await self._announce(DrainPhase.CLOSING)
        self.http.stop_listening()
        self.buffers.give_up_lost()
        async with asyncio.TaskGroup() as group:
            group.create_task(self.grpc.stop(timeout_s + LAST_WORDS_S))
            await self.drain.finish(timeout_s)
            await self.grpc.stop(LAST_WORDS_S)


@asynccontextmanager
async def running_gateway(
    settings: GatewaySettings, stop: asyncio.Event | None = None, *, traced: bool = False
) -> AsyncIterator[Gateway]:
    """Serve while the block runs. `stop` is set, and GaveUpError raised after the block, when a loop ends by itself."""
    stop = stop or asyncio.Event()
    tls, public = settings.open_tls(), settings.open_public_tls()
    metrics, router = GatewayMetrics(Cause, settings.telemetry_names), new_router(settings, tls)
    export_end(metrics.registry, tls)
    gateway_id = f"{socket.gethostname()}-{secrets.token_hex(4)}"
    pool = WorkerPool(gateway_id, settings.silence_timeout_s, settings.heartbeat_s, tls)
    budget = ResumeBudget(settings.resume_tokens_per_s)
    upstream = Upstream(router, pool, budget, resume_policy(settings), metrics.count_resume, metrics.count_resumed)
    redis = open_redis(settings.redis, settings.redis_timeout_s, connects_beside=True)
    guard, keys = RedisGuard(redis, settings.redis, settings.redis_timeout_s, metrics), RedisKeys(settings.namespace)
    registry = AdapterRegistry(guard, keys)
    table = RouteTable(settings.routes_file, RouteRegistry(guard, keys))
    canaries = Canaries(guard, keys, table, gateway_id, metrics)
    kept_redis = open_redis(settings.redis, STORE_S)
    cards = RedisGuard(kept_redis, settings.redis, STORE_S, metrics, "cards of models are not stored")
    catalog = Catalog(router, pool, registry, CardStore(cards, keys), tls)
    adapters = AdapterAdmin(catalog, router, registry, tls)
    peers = Peers(guard, keys, gateway_id)
    wrap = response_cache(settings, guard, keys, metrics)
    request_log = new_request_log(settings, kept_redis, keys, metrics)
    pipeline = Pipeline(catalog, upstream, metrics, wrap, log_prompts=settings.log_prompts, request_log=request_log)
    directory = new_directory(settings, guard, keys)
    gate, drain = new_gate(settings, directory, guard, keys, metrics, peers), Drain()
    tracer = RequestTracer(enabled=traced, gen_ai="gen_ai" in settings.telemetry_names)
    grammars = GrammarCompiler(settings.grammar_timeout_s, closed=not settings.additional_properties)
    stores = kept_responses(settings, kept_redis, keys, metrics)
    batches = Batches(settings, keys, metrics) if settings.batch_storage_bytes else None
    fine_tuning = FineTuning(batches.files, adapters) if batches else None
    ledger = new_ledger(settings, redis, keys, metrics, gateway_id)
    services = SharedServices(
        settings,
        router,
        adapters,
        pipeline,
        table,
        canaries,
        grammars,
        gate,
        stores,
        metrics,
        tracer,
        drain,
        batches,
        fine_tuning,
        ledger,
        new_reports(settings, kept_redis, keys, metrics),
    )
    places = settings.responses_background if settings.responses_ttl_s else 0
    background = (
        background_claims(stores.queue, services.background_routes(), places, gateway_id, drain) if places else None
    )
    batch_routes = services.batch_routes()
    metrics.workers.set_function(lambda: len(router.listed.views))
    metrics.routers_up.set_function(lambda: router.answered)
    metrics.drain_remaining.set_function(lambda: drain.remaining)
    metrics.drain_last_arrival.set_function(lambda: drain.last_arrival_s)
    metrics.live_peers.set_function(lambda: settings.gateway_replicas or peers.live)
    metrics.usage_waiting.set_function(lambda: ledger.waiting_tokens)
    try:
        await table.refresh()  # before the first request comes
        async with (
            aclosing(ledger),
            aclosing(request_log),
            running_loops(stop, ledger.run(), retried(request_log.run)),
            running_loops(
                stop,
                router.follow_routers(),
                catalog.run(),
                pool.watch(),
                table.run(),
                retried(canaries.run),
                *([public.watch()] if public else []),
                *([peers.run()] if settings.tenancy and not settings.gateway_replicas else []),
                *([retried(partial(batches.run, batch_routes, gate, gateway_id, drain))] if batches else []),
                *([retried(background.run)] if background else []),
                *([retried(partial(fine_tuning.run, batch_routes, services.meter, gateway_id))] if fine_tuning else []),
            ),
            aclosing(grammars),
            aclosing(services.buffers),
            aclosing(services.models.mirrors),
            aclosing(services.external),
            serving_http(services.routes(), settings, drain, (settings.host, settings.gateway_port), public) as http,
            serving_admin(settings, KeyRegistry(guard, keys, directory.forget), table, canaries, gate) as admin,
            serving_grpc(services.inference(), settings, public) as grpc,
        ):
            gateway = Gateway(http, grpc, admin, catalog, metrics, drain, services.buffers, settings)
            try:
                yield gateway
            finally:
                await gateway.end(settings.drain_timeout_s)
    finally:
        await pool.close()
        await router.close()
        await redis.aclose()
        await kept_redis.aclose()
        if batches:
            await batches.aclose()


async def serve(settings: GatewaySettings, stop: asyncio.Event) -> None:
    """Serve until `stop`."""
    with tracing("gateway") as traced:
        async with running_gateway(settings, stop, traced=traced) as gateway:
            freeze_started()
            # Metrics stay up to the end, so that a drain can be watched.
            loop = asyncio.get_running_loop()
            with serve_metrics(
                settings.host, settings.metrics_port, gateway.metrics.registry, lambda: gateway.waits_for
            ):
                await stop.wait()
                deadline = loop.time() + settings.drain_delay_s + settings.drain_timeout_s
                await gateway.leave()
                await gateway.end(deadline - loop.time())


def main() -> None:
    """Entry point of ``python -m services.gateway``."""
    run_service("gateway", GatewaySettings, serve)
