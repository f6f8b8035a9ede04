"""Makes the services that the public APIs share, and the APIs themselves, from the settings."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import msgspec
from redis.asyncio import Redis
from starlette.applications import Starlette

from services.common.keys import RedisKeys
from services.common.lifecycle import StartupError
from services.common.router_addresses import RouterAddresses
from services.common.tls.credentials import Tls
from services.gateway.api.schema import ChatBody, CompletionBody
from services.gateway.asgi import ASGIApp
from services.gateway.batches.module import Batches
from services.gateway.billing.ledger import UsageLedger
from services.gateway.billing.meter import Meter
from services.gateway.billing.report import UsageReader
from services.gateway.drain import Drain
from services.gateway.files.reader import FileReader
from services.gateway.fine_tuning.module import FineTuning
from services.gateway.generation.cache import ResponseCache
from services.gateway.generation.chat import ChatPreparer
from services.gateway.generation.chat_body import ChatBodyPreparer
from services.gateway.generation.completions import CompletionPreparer
from services.gateway.generation.embedding import Embedder
from services.gateway.generation.entrance import Entrance
from services.gateway.generation.logprobs import LogprobWriter
from services.gateway.generation.mirroring import Mirrors
from services.gateway.generation.models import Models
from services.gateway.generation.pipeline import Pipeline, Wrapper
from services.gateway.generation.request import LAST_PRIORITY
from services.gateway.generation.request_log import RequestLog
from services.gateway.generation.resume import ResumePolicy
from services.gateway.generation.waiting import PatienceLimits
from services.gateway.grammar.admission import GrammarCompiler
from services.gateway.grpc.inference import InferenceService
from services.gateway.http.adapters import AdapterAdmin, add_deletion
from services.gateway.http.app import new_app
from services.gateway.http.dispatcher import Dispatcher
from services.gateway.http.endpoint import Endpoint
from services.gateway.http.exchange import ApiDialect, BodyLimits
from services.gateway.http.handlers import Route, hot_routes
from services.gateway.http.outside import ExternalClient
from services.gateway.http.playground import add_playground
from services.gateway.http.responses.conversation_routes import add_conversations
from services.gateway.http.responses.kept import StoreLimits
from services.gateway.http.responses.module import KeptResponses
from services.gateway.http.responses.routes import add_routes
from services.gateway.http.usage import UsageReports, add_usage
from services.gateway.images.decoding import ImageLimits
from services.gateway.images.fetching import FetchPolicy, ImageFetcher
from services.gateway.images.reader import ImageReader
from services.gateway.names.canaries import Canaries
from services.gateway.names.table import RouteTable
from services.gateway.observation import Observer
from services.gateway.origins import OriginPolicy
from services.gateway.responses.socket import ResponsesSocket
from services.gateway.settings import GatewaySettings
from services.gateway.spans import RequestTracer
from services.gateway.telemetry import GatewayMetrics
from services.gateway.tenants.gate import TenantGate
from services.gateway.tenants.jwt_tokens import JwtIssuer, JwtVerifier, TokenLimits
from services.gateway.tenants.keys import KeyDirectory, read_keys
from services.gateway.tenants.limits import Concurrency, RateLimits
from services.gateway.tenants.peers import Peers
from services.gateway.tenants.redis_guard import RedisGuard
from services.gateway.tenants.stored import StoredCredentials
from services.gateway.tenants.tenant import Gate, OpenGate
from services.gateway.upstream.catalog import Catalog
from services.gateway.upstream.router import RouterClient
from services.gateway.websocket.handshake import Connect, Sockets
from services.gateway.websocket.protocol import SingleSequence
from services.gateway.websocket.replay import ReplayBuffers
from services.gateway.websocket.socket import StreamSocket

STORE_S = 1.0  # longest wait for Redis when a stored response is read or written


def resume_policy(settings: GatewaySettings) -> ResumePolicy:
    """Return the limits within which an interrupted generation continues on another worker."""
    return ResumePolicy(
        max_faults=settings.max_faults,
        deadline_s=settings.resume_deadline_s,
        stall_s=settings.progress_timeout_s,
    )


@dataclass(slots=True)
class SharedServices:
    """The services that the three public APIs share, on top of one pipeline."""

    settings: GatewaySettings
    router: RouterClient
    adapters: AdapterAdmin
    pipeline: Pipeline
    table: RouteTable
    canaries: Canaries
    grammars: GrammarCompiler
    gate: Gate
    stores: KeptResponses
    metrics: GatewayMetrics
    tracer: RequestTracer
    drain: Drain
    batches: Batches | None
    fine_tuning: FineTuning | None
    ledger: UsageLedger
    usage: UsageReports
    catalog: Catalog = field(init=False)
    models: Models = field(init=False)
    external: ExternalClient = field(init=False)
    completions: CompletionPreparer = field(init=False)
    chat: ChatPreparer = field(init=False)
    hot: list[Route] = field(init=False)
    embedder: Embedder = field(init=False)
    buffers: ReplayBuffers = field(init=False)

    def __post_init__(self) -> None:
        settings, catalog, metrics = self.settings, self.pipeline.catalog, self.metrics
        self.catalog, self.embedder, self.external = catalog, Embedder(self.pipeline), ExternalClient()
        fetcher = ImageFetcher(FetchPolicy(settings.image_hosts, settings.image_timeout_s))
        limits = ImageLimits(settings.image_max_count, settings.image_max_bytes, settings.image_max_pixels)
        self.chat = ChatPreparer(self.pipeline, self.grammars, settings, ImageReader(limits, fetcher), FileReader())
        self.completions = CompletionPreparer(self.pipeline, self.grammars)
        mirrors = Mirrors(catalog, metrics, self.canaries.compared)
        self.models = Models(catalog, self.table, mirrors, settings.fallback_model, metrics)
        made = self.chat, self.completions, self.embedder, self.stores, self.gate.credential
        self.hot = hot_routes(settings, *made, self.adapters, self.external)
        self.buffers = ReplayBuffers(settings.stream_resume_window_s)

    def _origins(self) -> OriginPolicy:
        settings = self.settings
        return OriginPolicy(settings.allowed_origins, host=settings.host, keyless=not settings.tenancy)

    @property
    def meter(self) -> Meter:
        """Counts what is used, with its costs."""
        return Meter(self.ledger, self.settings.read_prices())

    @property
    def _entrance(self) -> Entrance:
        settings = self.settings
        patience = PatienceLimits(settings.patience_s, settings.stream_patience_s, settings.max_patience_s)
        refuses = settings.unknown_fields == "refuse"
        return Entrance(self.gate, self.models, self.meter, refuses, settings.request_timeout_s, patience)

    def _limits(self) -> BodyLimits:
        return BodyLimits(self.settings.max_body_bytes, self.settings.body_timeout_s)

    def _endpoints(self, entrance: Entrance) -> dict[str, Endpoint]:
        """The hot routes, behind `entrance`."""
        limits = self._limits()
        return {path: one for route in self.hot for path, one in route.endpoints(entrance, limits).items()}

    @property
    def _dialects(self) -> dict[str, ApiDialect]:
        return {route.path: route.dialect for route in self.hot}

    def batch_routes(self) -> ASGIApp:
        """The hot routes, for the requests of batches, whose time is their batch's window."""
        entrance = self._entrance
        entrance = replace(entrance, meter=replace(entrance.meter, batch=True), time_limit_s=0.0)
        gate = StoredCredentials(self.gate, LAST_PRIORITY)
        return self._inner_routes("batch", replace(entrance, gate=gate))

    def background_routes(self) -> ASGIApp:
        """The hot routes, for responses in the background."""
        entrance = replace(self._entrance, gate=StoredCredentials(self.gate))
        return self._inner_routes("background", entrance)

    def _inner_routes(self, api: str, entrance: Entrance) -> ASGIApp:
        """The hot routes, for requests that the gateway sends itself; metrics name the `api` that they come from."""
        observer, endpoints = Observer(api, self.metrics, self.tracer), self._endpoints(entrance)
        origins, drain = self._origins(), self.drain
        sockets = Sockets({}, drain, origins, self.metrics)
        return Dispatcher(Starlette(), endpoints, sockets, observer, drain, origins, self._dialects)

    def routes(self) -> ASGIApp:
        """REST and WebSocket."""
        catalog, gate, origins = self.catalog, self.gate, self._origins()
        parts = [part for part in (self.batches, self.fine_tuning) if part]
        entrance = self._entrance
        endpoints = self._endpoints(entrance)
        documented = {route.path: route.documented for route in self.hot}
        for part in parts:
            endpoints |= part.endpoints(entrance, self._limits())
            documented |= part.documented
        socket = StreamSocket(
            entrance,
            {
                "chat": SingleSequence(ChatBody, ChatBodyPreparer(self.chat), LogprobWriter.chat),
                "completion": SingleSequence(CompletionBody, self.completions, LogprobWriter.completion),
            },
            self.buffers,
            Observer("websocket", self.metrics, self.tracer),
            self.settings.stream_max_generations,
            self.drain,
        )
        app = new_app(
            catalog,
            self.models,
            self.router,
            gate,
            self.metrics,
            lambda: catalog.ready and not self.drain.draining,
            documented,
            [*([add_playground] if self.settings.playground else []), *(part.add_routes for part in parts)],
        )
        add_routes(app, self.stores.queue)
        add_conversations(app, self.stores.conversations, self._limits(), refuse_fields=entrance.refuse_fields)
        add_usage(app, self.usage)
        add_deletion(app, self.adapters)
        observer = Observer("rest", self.metrics, self.tracer)
        many = ResponsesSocket(self._inner_routes("websocket", entrance), self.drain, self.settings.max_body_bytes)
        paths: dict[str, Connect] = {"/v1/stream": socket.connect, "/v1/responses": many.connect}
        sockets = Sockets(paths, self.drain, origins, self.metrics)
        return origins.share(Dispatcher(app, endpoints, sockets, observer, self.drain, origins, self._dialects))

    def inference(self) -> InferenceService:
        """gRPC."""
        observer = Observer("grpc", self.metrics, self.tracer)
        return InferenceService(
            self._entrance,
            self.completions,
            ChatBodyPreparer(self.chat),
            self.embedder,
            observer,
            self.drain,
        )


def new_router(settings: GatewaySettings, tls: Tls | None) -> RouterClient:
    """Return a client of all routers that the settings name."""
    return RouterClient(
        RouterAddresses(settings.router_addresses),
        route_timeout_s=settings.route_timeout_s,
        tls=tls,
    )


def new_directory(settings: GatewaySettings, guard: RedisGuard, keys: RedisKeys) -> KeyDirectory:
    """Return what finds the tenants of keys; raises :class:`StartupError`. With tenancy off it is not asked."""
    fixed = read_keys(settings.api_keys_file, settings.api_keys) if settings.tenancy else {}
    return KeyDirectory(fixed, guard, keys)


def new_gate(
    settings: GatewaySettings,
    directory: KeyDirectory,
    guard: RedisGuard,
    keys: RedisKeys,
    metrics: GatewayMetrics,
    peers: Peers,
) -> Gate:
    """Return the check of keys and limits; with tenancy off it admits all requests."""
    if not settings.tenancy:
        return OpenGate()
    replicas = settings.gateway_replicas
    live = (lambda: replicas) if replicas else (lambda: peers.live)
    return TenantGate(
        directory,
        RateLimits(guard, keys.rate_limit_prefix(), live),
        Concurrency(live),
        guard,
        keys,
        metrics,
        token_verifier(settings),
        settings.quota_status,
    )


def token_verifier(settings: GatewaySettings) -> JwtVerifier | None:
    """Return what checks bearer tokens of the settings' issuer, if there is one; raises :class:`StartupError`."""
    if not settings.jwt_issuer:
        return None
    try:
        limits = msgspec.json.decode(settings.jwt_limits, type=TokenLimits)
    except msgspec.DecodeError as error:
        raise StartupError(f"RYZANSTEIN_JWT_LIMITS: {error}") from error
    return JwtVerifier(
        JwtIssuer(settings.jwt_issuer, settings.jwt_audience, settings.jwt_jwks_url, settings.jwt_tenant_claim, limits)
    )


def response_cache(settings: GatewaySettings, guard: RedisGuard, keys: RedisKeys, metrics: GatewayMetrics) -> Wrapper:
    """Return what answers repeated requests from Redis; without a life time it answers none."""
    if not settings.response_cache_ttl_s:
        return lambda request, live: live
    return ResponseCache(guard, keys, settings.response_cache_ttl_s, metrics).wrap


def kept_responses(settings: GatewaySettings, redis: Redis, keys: RedisKeys, metrics: GatewayMetrics) -> KeptResponses:
    """Stores with its own Redis guard, since reading a conversation takes longer than a limit check may."""
    guard = RedisGuard(redis, settings.redis, STORE_S, metrics, "no responses are kept until it is back")
    limits = StoreLimits(
        life_s=settings.responses_ttl_s,
        response_bytes=settings.responses_max_bytes,
        tenant_bytes=settings.responses_tenant_bytes,
        conversation_bytes=settings.max_body_bytes,
    )
    return KeptResponses(guard, keys, limits)


def new_ledger(
    settings: GatewaySettings, redis: Redis, keys: RedisKeys, metrics: GatewayMetrics, gateway_id: str
) -> UsageLedger:
    """Return what counts usage, with a guard of its own: its writes may fail where the limits' do not."""
    guard = RedisGuard(redis, settings.redis, settings.redis_timeout_s, metrics, "usage waits here until it is back")
    return UsageLedger(guard, keys, gateway_id, settings.retention, metrics)


def new_request_log(settings: GatewaySettings, redis: Redis, keys: RedisKeys, metrics: GatewayMetrics) -> RequestLog:
    """Return the log of requests, with a guard of its own: its entries wait while Redis is away."""
    guard = RedisGuard(redis, settings.redis, STORE_S, metrics, "requests wait here to be logged until it is back")
    return RequestLog(guard, keys, settings.request_log_entries, settings.request_log_life_s, metrics)


def new_reports(settings: GatewaySettings, redis: Redis, keys: RedisKeys, metrics: GatewayMetrics) -> UsageReports:
    """Return what reads usage, with a guard of its own, since reading many buckets takes longer than a limit check."""
    guard = RedisGuard(redis, settings.redis, STORE_S, metrics, "no usage is read until it is back")
    return UsageReports(UsageReader(guard, keys), settings.retention, settings.currency)
