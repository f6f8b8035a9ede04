"""Wires the gateway together and runs it."""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import AsyncIterator, Coroutine
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass

from ryzanstein.v1 import inference_pb2_grpc

from services.common.heap import freeze_started
from services.common.keys import RedisKeys
from services.common.lifecycle import StartupError, run_service
from services.common.metrics import serve_metrics
from services.common.redis_client import open_redis
from services.common.rpc import Health, bind, new_server
from services.common.tasks import end_tasks
from services.common.tracing import tracing
from services.gateway.api.app import new_app
from services.gateway.api.chat import ChatEndpoint
from services.gateway.api.completions import CompletionEndpoint
from services.gateway.api.embeddings import Embedder, EmbeddingEndpoint
from services.gateway.api.front import Endpoint, Front
from services.gateway.api.generate import GenerateEndpoint, JobMaker
from services.gateway.api.http import BodyLimits
from services.gateway.api.schema import ChatBody, CompletionBody
from services.gateway.api.tokens import DetokenizeEndpoint, TokenizeEndpoint
from services.gateway.generation.budget import ResumeBudget
from services.gateway.generation.pipeline import Pipeline, Wrapper
from services.gateway.inference import SERVICE, InferenceService
from services.gateway.observation import Observer
from services.gateway.realtime.recording import Recordings
from services.gateway.realtime.socket import StreamSocket
from services.gateway.resume import ResumePolicy, Upstream
from services.gateway.server import HttpServer, listen, new_http_server
from services.gateway.settings import GatewaySettings
from services.gateway.spans import RequestTracer
from services.gateway.telemetry import GatewayMetrics
from services.gateway.tenants.cache import ResponseCache
from services.gateway.tenants.gate import TenantGate
from services.gateway.tenants.keys import KeyDirectory, read_keys
from services.gateway.tenants.limits import Concurrency, RateLimits
from services.gateway.tenants.redis_guard import RedisGuard
from services.gateway.tenants.tenant import Gate, OpenGate
from services.gateway.upstream.catalog import Catalog
from services.gateway.upstream.connection import WorkerPool
from services.gateway.upstream.router import RouterClient


@dataclass(frozen=True, slots=True)
class Gateway:
    """A running gateway."""

    http: HttpServer
    grpc_port: int
    catalog: Catalog
    metrics: GatewayMetrics


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
    """What the three public APIs share."""

    settings: GatewaySettings
    catalog: Catalog
    router: RouterClient
    gate: Gate
    metrics: GatewayMetrics
    completions: JobMaker[CompletionBody]
    chat: JobMaker[ChatBody]
    embedder: Embedder
    recordings: Recordings
    tracer: RequestTracer

    def front(self) -> Front:
        """REST and WebSocket."""
        catalog, gate = self.catalog, self.gate
        limits = BodyLimits(self.settings.max_body_bytes, self.settings.body_timeout_s)
        endpoints: dict[str, Endpoint] = {
            "/v1/chat/completions": GenerateEndpoint(self.chat, gate, limits),
            "/v1/completions": GenerateEndpoint(self.completions, gate, limits),
            "/v1/embeddings": EmbeddingEndpoint(self.embedder, catalog, gate, limits),
            "/tokenize": TokenizeEndpoint(catalog, gate, limits),
            "/detokenize": DetokenizeEndpoint(catalog, gate, limits),
        }
        socket = StreamSocket(
            gate,
            {"chat": self.chat, "completion": self.completions},
            self.recordings,
            Observer("websocket", self.metrics, self.tracer),
            self.metrics.sockets,
            self.settings.stream_max_generations,
        )
        app = new_app(catalog, self.router, gate, self.metrics, lambda: catalog.ready)
        return Front(app, endpoints, {"/v1/stream": socket}, Observer("rest", self.metrics, self.tracer))

    def inference(self) -> InferenceService:
        """gRPC."""
        observer = Observer("grpc", self.metrics, self.tracer)
        return InferenceService(self.catalog, self.gate, self.completions, self.chat, self.embedder, observer)


def _new_router(settings: GatewaySettings) -> RouterClient:
    return RouterClient(
        settings.router_addresses,
        route_timeout_s=settings.route_timeout_s,
        unknown_timeout_s=settings.route_unknown_s,
    )


def _new_gate(settings: GatewaySettings, guard: RedisGuard, keys: RedisKeys, metrics: GatewayMetrics) -> Gate:
    if not settings.tenancy:
        return OpenGate()
    fixed = read_keys(settings.api_keys_file, settings.api_keys)
    return TenantGate(
        KeyDirectory(fixed, guard, keys),
        RateLimits(guard, keys.rate_limit_prefix(), settings.gateway_replicas),
        Concurrency(settings.gateway_replicas),
        guard,
        keys,
        metrics,
    )


def _cache_of(settings: GatewaySettings, guard: RedisGuard, keys: RedisKeys, metrics: GatewayMetrics) -> Wrapper:
    if not settings.response_cache_ttl_s:
        return lambda request, live: live
    return ResponseCache(guard, keys, settings.response_cache_ttl_s, metrics).wrap


def _new_services(
    settings: GatewaySettings,
    router: RouterClient,
    pipeline: Pipeline,
    gate: Gate,
    metrics: GatewayMetrics,
    tracer: RequestTracer,
) -> _Services:
    fallback, catalog = settings.fallback_model, pipeline.catalog
    return _Services(
        settings,
        catalog,
        router,
        gate,
        metrics,
        JobMaker(CompletionEndpoint(pipeline, settings), catalog, fallback, metrics),
        JobMaker(ChatEndpoint(pipeline, settings), catalog, fallback, metrics),
        Embedder(pipeline, gate),
        Recordings(settings.stream_resume_window_s),
        tracer,
    )


@asynccontextmanager
async def _tasks(*loops: Coroutine[None, None, None]) -> AsyncIterator[None]:
    """Background loops that run while the block does."""
    tasks = [asyncio.create_task(loop) for loop in loops]
    try:
        yield
    finally:
        await end_tasks(tasks)


@asynccontextmanager
async def _http(front: Front, settings: GatewaySettings) -> AsyncIterator[HttpServer]:
    listener = listen(settings)
    server = new_http_server(front, settings)
    serving = asyncio.create_task(server.serve([listener]))
    while not server.started:
        if serving.done():
            raise StartupError("the HTTP server ended at its start") from serving.exception()
        await asyncio.sleep(0.01)
    try:
        yield server
    finally:
        server.stop()
        await serving


@asynccontextmanager
async def _grpc(service: InferenceService, settings: GatewaySettings) -> AsyncIterator[int]:
    """Serve gRPC and yield its port; 0 when it is off."""
    if not settings.grpc_port:
        yield 0
        return
    server = new_server()
    inference_pb2_grpc.add_InferenceServicer_to_server(service, server)
    health = Health(server, [SERVICE])
    port = bind(server, settings.host, settings.grpc_port)
    await server.start()
    await health.set_serving(True)
    try:
        yield port
    finally:
        await health.set_serving(False)
        await server.stop(settings.drain_timeout_s)


@asynccontextmanager
async def running_gateway(settings: GatewaySettings, *, traced: bool = False) -> AsyncIterator[Gateway]:
    """A gateway that serves while the block runs."""
    metrics, router = GatewayMetrics(), _new_router(settings)
    pool = WorkerPool(f"{socket.gethostname()}-{secrets.token_hex(4)}", settings.connect_timeout_s)
    catalog = Catalog(router, pool)
    budget = ResumeBudget(settings.resume_tokens_per_s)
    upstream = Upstream(router, pool, budget, _resume_policy(settings), metrics.count_resume)
    redis = open_redis(settings.redis, settings.redis_timeout_s)
    guard, keys = RedisGuard(redis, settings.redis, settings.redis_timeout_s, metrics), RedisKeys(settings.namespace)
    wrap = _cache_of(settings, guard, keys, metrics)
    pipeline = Pipeline(catalog, upstream, metrics, wrap, log_prompts=settings.log_prompts)
    gate, tracer = _new_gate(settings, guard, keys, metrics), RequestTracer(enabled=traced)
    services = _new_services(settings, router, pipeline, gate, metrics, tracer)
    metrics.watch(workers=lambda: len(router.fleet.workers), routers_up=lambda: router.answered)
    watch_s = min(1.0, settings.stall_timeout_s / 4)
    try:
        async with (
            _tasks(catalog.run(settings.refresh_s), router.send_reports(), pool.watch_stalls(watch_s)),
            aclosing(services.recordings),
            _http(services.front(), settings) as http,
            _grpc(services.inference(), settings) as grpc_port,
        ):
            yield Gateway(http, grpc_port, catalog, metrics)
    finally:
        await pool.close()
        await router.close()
        await redis.aclose()


async def serve(settings: GatewaySettings, stop: asyncio.Event) -> None:
    """Serve until `stop`."""
    with tracing("gateway") as traced:
        async with running_gateway(settings, traced=traced) as gateway:
            freeze_started()
            registry, catalog = gateway.metrics.registry, gateway.catalog
            with serve_metrics(settings.host, settings.metrics_port, registry, lambda: catalog.ready):
                await stop.wait()


def main() -> None:
    """Entry point of ``python -m services.gateway``."""
    run_service("gateway", GatewaySettings, serve)
