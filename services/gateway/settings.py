"""Settings of the gateway: environment variables with the prefix ``RYZANSTEIN_``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator
from pydantic_settings import NoDecode

from services.common.router_addresses import router_address
from services.common.settings import PREFIX
from services.gateway.billing.settings import BillingSettings
from services.gateway.images.hosts import image_host
from services.gateway.origins import origin
from services.gateway.public_tls import CertificateFiles, PublicTls
from services.gateway.tenants.settings import AccessSettings
from services.gateway.tools.formats import PARSERS

Origin = Annotated[str, AfterValidator(origin)]
ImageHost = Annotated[str, AfterValidator(image_host)]
RouterAddress = Annotated[str, AfterValidator(router_address)]
_BEATS_IN_A_SILENCE = 8


class GatewaySettings(AccessSettings, BillingSettings):
    """Read once, at start."""

    gateway_port: int = Field(default=8000, ge=0, le=65535, description="Port of REST, WebSocket, /health and /metrics")
    grpc_port: int = Field(default=0, ge=0, le=65535, description="Port of the public gRPC service; 0 is off")
    grpc_max_connection_age_s: float = Field(
        default=300.0,
        ge=0,
        description="A gRPC connection this old (10 % more or less) is closed gracefully, so that clients reach new "
        "gateways; its calls run to their end; 0: never",
    )
    gateway_tls_certificate: str = Field(
        default="",
        description="PEM file with the certificate and its chain for clients: the public ports (REST, gRPC) speak TLS "
        "then, and nothing else; read again when it changes. Default: plain text, as behind an ingress",
    )
    gateway_tls_key: str = Field(default="", description="PEM file with its key, not encrypted")
    router_addresses: Annotated[tuple[RouterAddress, ...], NoDecode] = Field(
        default=("127.0.0.1:50052",),
        min_length=1,
        description="Routers as host:port, comma-separated, or dns:host:port for all addresses behind a name; one that "
        "answers is used",
    )
    fallback_model: str = Field(
        default="", description="Model that answers when a model has no worker left; empty: none"
    )
    routes_file: str = Field(
        default="",
        description="JSON file of routes, names for models with shares and fallbacks; read again when it changes",
    )

    allowed_origins: Annotated[tuple[Origin, ...], NoDecode] = Field(
        default=(),
        description="Origins, comma-separated, whose web pages may use the gateway (CORS, WebSocket), or *; pages "
        "of its own address may, and clients that are no browsers",
    )
    playground: bool = Field(default=True, description="Serve a page at / that talks to the models")
    unknown_fields: Literal["ignore", "refuse"] = Field(
        default="ignore",
        description="Fields of requests that no API here knows: left out, and named in the answer's header "
        "`x-ryzanstein-ignored`; or refused with 400",
    )
    max_body_bytes: int = Field(default=16 * 1024 * 1024, ge=1024, description="Largest request body")
    header_timeout_s: float = Field(default=10.0, gt=0, description="A request's head must arrive within this time")
    body_timeout_s: float = Field(default=30.0, gt=0, description="A request's body must arrive within this time")
    send_timeout_s: float = Field(
        default=60.0, gt=0, description="A client that lets an answer wait this long without reading is dropped"
    )
    keep_alive_s: float = Field(
        default=620.0,
        gt=0,
        description="Idle connections are closed after this time, which must be longer than that of proxies (Traefik "
        "90 s, Google's load balancers 600 s), because requests over a connection that is being closed are lost",
    )
    sse_heartbeat_s: float = Field(
        default=15.0,
        gt=0,
        description="A stream of events that is silent for this long sends a comment, so that no proxy closes "
        "it: in Messages a ping, in Responses an event after eight in a row or 120 s",
    )

    tool_parser: str = Field(
        default="auto",
        description=f"How models write tool calls: {', '.join(PARSERS)}; auto: as their chat templates show",
    )
    reasoning: Literal["auto", "off"] = Field(
        default="auto",
        description="auto: text between the thinking tags of a model's template is `reasoning_content`; off: it is "
        "content",
    )
    grammar_timeout_s: float = Field(
        default=2.0, gt=0, description="A schema or grammar for structured output must be compiled within this time"
    )
    additional_properties: bool = Field(
        default=False,
        description="Whether objects that answers and tool calls hold may have properties that their schema does not "
        "name, where it names some and has no `additionalProperties`",
    )

    image_hosts: Annotated[tuple[ImageHost, ...], NoDecode] = Field(
        default=(),
        description="Hosts, comma-separated, whose images are fetched by https (host, host:port, *.domain) for vision "
        "models; none: requests contain their images. Private addresses are never used",
    )
    image_timeout_s: float = Field(default=10.0, gt=0, description="Longest time to fetch an image")
    image_max_count: int = Field(default=32, ge=1, description="Most images of a request")
    image_max_bytes: int = Field(
        default=20 * 1024 * 1024, ge=1024, description="Largest image, as it is sent or fetched"
    )
    image_max_pixels: int = Field(default=36_000_000, ge=1, description="Most pixels of an image")

    control_tokens_in_messages: bool = Field(
        default=False,
        description="Read control tokens that chat messages spell (`<|end|>`) as such, for templates that rely on it",
    )

    log_prompts: bool = Field(
        default=False, description="Write every prompt to the log; for debugging, never for users"
    )

    redis_timeout_s: float = Field(default=0.25, gt=0, description="Longest wait for Redis at admission")
    gateway_replicas: int = Field(
        default=0,
        ge=0,
        description="Gateways that share concurrency caps, and limits while Redis is away; 0: the number of heartbeats "
        "in Redis",
    )
    responses_ttl_s: int = Field(
        default=86_400, ge=0, description="How long /v1/responses keeps a response after its last use; 0: none is kept"
    )
    responses_max_bytes: int = Field(
        default=1024 * 1024, ge=1024, description="Largest response that is kept, with its turn's input"
    )
    responses_tenant_bytes: int = Field(
        default=32 * 1024 * 1024,
        ge=1024,
        description="Largest size of a tenant's kept responses; the least recently used ones are dropped",
    )
    responses_background: int = Field(
        default=32,
        ge=0,
        description="Responses with `background` that a gateway makes at once; others wait in Redis; 0: refused",
    )
    response_cache_ttl_s: int = Field(
        default=0, ge=0, description="How long answers of deterministic requests are kept; 0: no cache"
    )

    batch_storage_bytes: int = Field(
        default=96 * 1024 * 1024,
        ge=0,
        description="Largest size of all batches' files in Redis, inputs and answers; 0: no files, no batches",
    )
    batch_tenant_bytes: int = Field(default=64 * 1024 * 1024, ge=1024, description="Largest size of one tenant's files")
    batch_file_bytes: int = Field(default=32 * 1024 * 1024, ge=1024, description="Largest file of a batch")
    batch_file_life_s: int = Field(
        default=7 * 24 * 3600,
        ge=60,
        description="How long files are kept after they were made, and batches after their end",
    )
    batch_concurrency: int = Field(
        default=16, ge=1, description="Requests of batches that a gateway runs at once, all batches together"
    )

    request_log_entries: int = Field(
        default=0,
        ge=0,
        description="Requests that the log for `ryzanstein plan` keeps in Redis: lengths, arrivals and hashes, "
        "no texts; 0: nothing is logged",
    )
    request_log_life_s: int = Field(default=8 * 24 * 3600, ge=60, description="How long the log keeps a request")

    route_timeout_s: float = Field(
        default=35.0, gt=0, description="Longest wait for a routing decision, its queue included"
    )
    patience_s: float = Field(
        default=60.0,
        ge=0,
        description="How long a request that is not streamed waits for a model without a serving worker, such as one "
        "that is scaled to zero; then 503",
    )
    stream_patience_s: float = Field(
        default=300.0, ge=0, description="The same for streamed requests, whose clients see the progress of the start"
    )
    max_patience_s: float = Field(
        default=900.0, ge=0, description="Largest value of the header `x-ryzanstein-patience`"
    )
    silence_timeout_s: float = Field(
        default=2.5,
        ge=1,
        description="A worker with running requests that sends nothing, not even a heartbeat, is lost after; it sends "
        "one eight times within this time, or within RYZANSTEIN_PROGRESS_TIMEOUT_S where that is shorter",
    )
    progress_timeout_s: float = Field(
        default=15.0,
        ge=1,
        description="A request is stalled, and goes on with another worker, after this long without progress: no "
        "token, no chunk of its prompt, no KV block, no file of its adapter, no step that it waits for",
    )
    request_timeout_s: float = Field(
        default=0.0,
        ge=0,
        description="Longest time of a request in all, its wait included; then it ends with 504 "
        "`deadline_exceeded`. Batches have their window instead; 0: no limit",
    )
    resume_deadline_s: float = Field(
        default=30.0, gt=0, description="Longest search for a worker that continues a stream"
    )
    max_faults: int = Field(default=3, ge=0, description="Faults a request survives before it is given up")
    resume_tokens_per_s: float = Field(default=200_000.0, gt=0, description="Re-prefill admitted per surviving worker")
    stream_resume_window_s: float = Field(
        default=30.0, ge=0, description="How long a WebSocket generation outlives its connection"
    )
    stream_max_generations: int = Field(default=64, ge=1, description="Concurrent generations on one WebSocket")
    drain_delay_s: float = Field(
        default=0.0,
        ge=0,
        description="After SIGTERM, /readyz answers 503 while everything else continues for this time, so that load "
        "balancers notice",
    )
    drain_silence_s: float = Field(
        default=0.0,
        ge=0,
        description="After that it listens until this long without a new request, for half of "
        "RYZANSTEIN_DRAIN_TIMEOUT_S at most: balancers on a busy machine notice late",
    )
    drain_timeout_s: float = Field(
        default=30.0,
        ge=0,
        description="Longest time of open requests after RYZANSTEIN_DRAIN_DELAY_S; then they end with an error",
    )

    @property
    def heartbeat_s(self) -> float:
        """How often workers with running requests send a heartbeat: several times within the limits of a silence."""
        return min(self.silence_timeout_s, self.progress_timeout_s) / _BEATS_IN_A_SILENCE

    @field_validator("tool_parser")
    @classmethod
    def _check_parser(cls, value: str) -> str:
        if value not in ("auto", *PARSERS):
            raise ValueError(f"must be auto or one of {', '.join(PARSERS)}")
        return value

    @field_validator("router_addresses", "allowed_origins", "image_hosts", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _certificate_and_key(self) -> Self:
        names = f"{PREFIX}GATEWAY_TLS_CERTIFICATE", f"{PREFIX}GATEWAY_TLS_KEY"
        if bool(self.gateway_tls_certificate) != bool(self.gateway_tls_key):
            raise ValueError(f"{' and '.join(names)}: set both, or none")
        try:
            self.open_public_tls()
        except OSError as error:  # ssl.SSLError is one
            raise ValueError(f"{' and '.join(names)} hold no certificate with its key: {error}") from error
        return self

    def open_public_tls(self) -> PublicTls | None:
        """TLS of the public ports; None: plain text. Raises OSError for unusable files."""
        if not self.gateway_tls_certificate:
            return None
        return PublicTls(CertificateFiles(Path(self.gateway_tls_certificate), Path(self.gateway_tls_key)))
