"""Wires the gateway together and runs it."""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
from collections.abc import AsyncIterator, Coroutine
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass

from redis.asyncio import Redis
from starlette.applications import Starlette

from services.common.expected_models import follow_expected
from services.common.heap import freeze_started
from services.common.keys import RedisKeys
from services.common.lifecycle import run_service
from services.common.metrics import serve_metrics
from services.common.redis_client import open_redis
from services.common.tasks import end_tasks
from services.common.tracing import tracing
from services.gateway.api.schema import ChatBody, CompletionBody
from services.gateway.asgi import ASGIApp
from services.gateway.batches.gate import BatchGate
from services.gateway.batches.parts import Batches
from services.gateway.drain import LAST_WORDS_S, Drain, Phase
from services.gateway.generation.attempt import Cause
from services.gateway.generation.budget import ResumeBudget
from services.gateway.generation.cache import ResponseCache
from services.gateway.generation.chat import ChatPreparer
from services.gateway.generation.chat_body import ChatBodyPreparer
from services.gateway.generation.completions import CompletionPreparer
from services.gateway.generation.embedding import Embedder
from services.gateway.generation.entrance import Entrance
from services.gateway.generation.logprobs import LogprobWriter
from services.gateway.generation.models import Models
from services.gateway.generation.pipeline import Pipeline, Wrapper
from services.gateway.generation.resume import ResumePolicy, Upstream
from services.gateway.grammar.admission import GrammarCompiler
from services.gateway.grpc.inference import InferenceService
from services.gateway.grpc.server import GrpcServer, serving_grpc
from services.gateway.http.app import new_app
from services.gateway.http.dispatcher import Dispatcher
from services.gateway.http.endpoint import Endpoint
from services.gateway.http.exchange import ApiDialect, BodyLimits
from services.gateway.http.handlers import Route, hot_routes
from services.gateway.http.playground import add_playground
from services.gateway.http.responses.routes import add_routes
from services.gateway.http.responses.store import ResponseStore, StoreLimits
from services.gateway.http.server import HttpServer, serving_http
from services.gateway.observation import Observer
from services.gateway.origins import OriginPolicy
from services.gateway.settings import GatewaySettings
from services.gateway.spans import RequestTracer
from services.gateway.telemetry import GatewayMetrics
from services.gateway.tenants.gate import TenantGate
from services.gateway.tenants.keys import KeyDirectory, read_keys
from services.gateway.tenants.limits import Concurrency, RateLimits
from services.gateway.tenants.peers import Peers
from services.gateway.tenants.redis_guard import RedisGuard
from services.gateway.tenants.tenant import Gate, OpenGate
from services.gateway.upstream.addresses import RouterAddresses
from services.gateway.upstream.catalog import Catalog
from services.gateway.upstream.connection import WorkerPool
from services.gateway.upstream.router import RouterClient
from services.gateway.websocket.handshake import Sockets
from services.gateway.websocket.protocol import SingleSequence
from services.gateway.websocket.replay import ReplayBuffers
from services.gateway.websocket.socket import StreamSocket

log = logging.getLogger(__name__)
_STORE_S = 1.0  # longest wait for Redis when a stored response is read or written


@dataclass(frozen=True, slots=True)
class Gateway:
    """A running gateway."""

    http: HttpServer
    grpc: GrpcServer
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

    async def _announce(self, phase: Phase) -> None:
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
        await self._announce(Phase.DRAINING)
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
        await self._announce(Phase.CLOSING)
        self.http.stop_listening()
        self.buffers.give_up_lost()
        async with asyncio.TaskGroup() as group:
            group.create_task(self.grpc.stop(timeout_s + LAST_WORDS_S))
            await self.drain.finish(timeout_s)
            await self.grpc.stop(LAST_WORDS_S)


def _resume_policy(settings: GatewaySettings) -> ResumePolicy:
    return ResumePolicy(
        max_faults=settings.max_faults,
        max_handoffs=settings.max_handoffs,
        poison_deaths=settings.poison_deaths,
        deadline_s=settings.resume_deadline_s,
        first_token_s=settings.first_token_timeout_s,
        stall_s=settings.stall_timeout_s,
    )


@dataclass(frozen=True, slots=True)
class _Services:
    """The services that the three public APIs share."""

    settings: GatewaySettings
    catalog: Catalog
    router: RouterClient
    gate: Gate
    metrics: GatewayMetrics
    models: Models
    completions: CompletionPreparer
    chat: ChatPreparer
    hot: list[Route]
    store: ResponseStore
    embedder: Embedder
    buffers: ReplayBuffers
    tracer: RequestTracer
    drain: Drain
    batches: Batches | None

    def _origins(self) -> OriginPolicy:
        settings = self.settings
        return OriginPolicy(settings.allowed_origins, host=settings.host, keyless=not settings.tenancy)

    def _entrance(self, gate: Gate) -> Entrance:
        return Entrance(gate, self.models)

    def _limits(self) -> BodyLimits:
        return BodyLimits(self.settings.max_body_bytes, self.settings.body_timeout_s)

    def _endpoints(self, gate: Gate) -> dict[str, Endpoint]:
        """The hot routes, behind `gate`."""
        entrance, limits = self._entrance(gate), self._limits()
        return {path: one for route in self.hot for path, one in route.endpoints(entrance, limits).items()}

    @property
    def _dialects(self) -> dict[str, ApiDialect]:
        return {route.path: route.dialect for route in self.hot}

    def batch_routes(self) -> ASGIApp:
        """The hot routes, for the requests of batches."""
        observer, endpoints = Observer("batch", self.metrics, self.tracer), self._endpoints(BatchGate(self.gate))
        return Dispatcher(Starlette(), endpoints, Sockets({}), observer, self.drain, self._origins(), self._dialects)

    def routes(self) -> ASGIApp:
        """REST and WebSocket."""
        catalog, gate, origins, batches = self.catalog, self.gate, self._origins(), self.batches
        entrance, endpoints = self._entrance(gate), self._endpoints(gate)
        documented = {route.path: route.documented for route in self.hot}
        if batches:
            endpoints |= batches.endpoints(entrance, self._limits())
            documented |= batches.documented
        socket = StreamSocket(
            entrance,
            {
                "chat": SingleSequence(ChatBody, ChatBodyPreparer(self.chat), LogprobWriter.chat),
                "completion": SingleSequence(CompletionBody, self.completions, LogprobWriter.completion),
            },
            self.buffers,
            Observer("websocket", self.metrics, self.tracer),
            self.metrics,
            self.settings.stream_max_generations,
            self.drain,
            origins,
        )
        app = new_app(
            catalog,
            self.router,
            gate,
            self.metrics,
            lambda: catalog.ready and not self.drain.draining,
            documented,
            [*([add_playground] if self.settings.playground else []), *([batches.add_routes] if batches else [])],
        )
        add_routes(app, self.store)
        observer = Observer("rest", self.metrics, self.tracer)
        sockets = Sockets({"/v1/stream": socket})
        return origins.share(Dispatcher(app, endpoints, sockets, observer, self.drain, origins, self._dialects))

    def inference(self) -> InferenceService:
        """gRPC."""
        observer = Observer("grpc", self.metrics, self.tracer)
        return InferenceService(
            self.catalog,
            self._entrance(self.gate),
            self.completions,
            ChatBodyPreparer(self.chat),
            self.embedder,
            observer,
            self.drain,
        )


def _new_router(settings: GatewaySettings) -> RouterClient:
    return RouterClient(
        RouterAddresses(settings.router_addresses),
        route_timeout_s=settings.route_timeout_s,
        unknown_timeout_s=settings.route_unknown_s,
    )


def _new_gate(
    settings: GatewaySettings, guard: RedisGuard, keys: RedisKeys, metrics: GatewayMetrics, peers: Peers
) -> Gate:
    if not settings.tenancy:
        return OpenGate()
    replicas = settings.gateway_replicas
    live = (lambda: replicas) if replicas else (lambda: peers.live)
    fixed = read_keys(settings.api_keys_file, settings.api_keys)
    return TenantGate(
        KeyDirectory(fixed, guard, keys),
        RateLimits(guard, keys.rate_limit_prefix(), live),
        Concurrency(live),
        guard,
        keys,
        metrics,
    )


def _cache_of(settings: GatewaySettings, guard: RedisGuard, keys: RedisKeys, metrics: GatewayMetrics) -> Wrapper:
    if not settings.response_cache_ttl_s:
        return lambda request, live: live
    return ResponseCache(guard, keys, settings.response_cache_ttl_s, metrics).wrap


def _new_store(settings: GatewaySettings, redis: Redis, keys: RedisKeys, metrics: GatewayMetrics) -> ResponseStore:
    """A store with its own Redis guard, since reading a conversation takes longer than a limit check may."""
    guard = RedisGuard(redis, settings.redis, _STORE_S, metrics, "no responses are kept until it is back")
    limits = StoreLimits(
        life_s=settings.responses_ttl_s,
        response_bytes=settings.responses_max_bytes,
        tenant_bytes=settings.responses_tenant_bytes,
        chain=settings.responses_max_chain,
        conversation_bytes=settings.max_body_bytes,
    )
    return ResponseStore(guard, keys, limits)


def _new_services(
    settings: GatewaySettings,
    router: RouterClient,
    pipeline: Pipeline,
    grammars: GrammarCompiler,
    gate: Gate,
    store: ResponseStore,
    metrics: GatewayMetrics,
    tracer: RequestTracer,
    drain: Drain,
    batches: Batches | None,
) -> _Services:
    catalog, embedder = pipeline.catalog, Embedder(pipeline)
    chat = ChatPreparer(pipeline, grammars, settings)
    completions = CompletionPreparer(pipeline, grammars, settings)
    return _Services(
        settings,
        catalog,
        router,
        gate,
        metrics,
        Models(catalog, settings.fallback_model, metrics),
        completions,
        chat,
        hot_routes(settings, chat, completions, embedder, store),
        store,
        embedder,
        ReplayBuffers(settings.stream_resume_window_s),
        tracer,
        drain,
        batches,
    )


@asynccontextmanager
async def _tasks(*loops: Coroutine[None, None, None]) -> AsyncIterator[None]:
    """Run the background loops while the block runs."""
    tasks = [asyncio.create_task(loop) for loop in loops]
    try:
        yield
    finally:
        await end_tasks(tasks)


@asynccontextmanager
async def running_gateway(settings: GatewaySettings, *, traced: bool = False) -> AsyncIterator[Gateway]:
    """Serve while the block runs."""
    metrics, router = GatewayMetrics(Cause), _new_router(settings)
    gateway_id = f"{socket.gethostname()}-{secrets.token_hex(4)}"
    pool = WorkerPool(gateway_id, settings.connect_timeout_s, settings.silence_timeout_s)
    expected = settings.read_expected()
    catalog = Catalog(router, pool)
    catalog.expect(expected)
    budget = ResumeBudget(settings.resume_tokens_per_s)
    upstream = Upstream(router, pool, budget, _resume_policy(settings), metrics.count_resume, metrics.resumed)
    redis = open_redis(settings.redis, settings.redis_timeout_s, connects_beside=True)
    guard, keys = RedisGuard(redis, settings.redis, settings.redis_timeout_s, metrics), RedisKeys(settings.namespace)
    peers = Peers(guard, keys, gateway_id)
    wrap = _cache_of(settings, guard, keys, metrics)
    pipeline = Pipeline(catalog, upstream, metrics, wrap, log_prompts=settings.log_prompts)
    gate, tracer, drain = _new_gate(settings, guard, keys, metrics, peers), RequestTracer(enabled=traced), Drain()
    grammars = GrammarCompiler(settings.grammar_timeout_s, closed=not settings.additional_properties)
    kept_redis = open_redis(settings.redis, _STORE_S)
    store = _new_store(settings, kept_redis, keys, metrics)
    batches = Batches(settings, keys, metrics) if settings.batch_storage_bytes else None
    services = _new_services(settings, router, pipeline, grammars, gate, store, metrics, tracer, drain, batches)
    metrics.watch(
        workers=lambda: len(router.listed.views),
        routers_up=lambda: router.answered,
        drain_remaining=lambda: drain.remaining,
        drain_last_arrival_s=lambda: drain.last_arrival_s,
        live_peers=lambda: settings.gateway_replicas or peers.live,
    )
    try:
        async with (
            _tasks(
                router.follow_routers(settings.resolve_s),
                follow_expected(settings.expected_models_file, expected, catalog.expect),
                catalog.run(settings.refresh_s),
                pool.watch(),
                *([peers.run()] if settings.tenancy and not settings.gateway_replicas else []),
                *([batches.run(services.batch_routes(), gate, gateway_id, drain)] if batches else []),
            ),
            aclosing(grammars),
            aclosing(services.buffers),
            serving_http(services.routes(), settings, drain) as http,
            serving_grpc(services.inference(), settings) as grpc,
        ):
            gateway = Gateway(http, grpc, catalog, metrics, drain, services.buffers, settings)
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
        async with running_gateway(settings, traced=traced) as gateway:
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
