"""The endpoints that generate: from bytes to a finished answer, with admission and fallback."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from services.gateway.api.heartbeat import Heartbeat
from services.gateway.api.http import BodyLimits, Exchange
from services.gateway.api.run import Job, run
from services.gateway.api.schema import MAX_SESSION_CHARS
from services.gateway.errors import NO_WORKERS, ApiError, invalid, unknown_model
from services.gateway.generation.output import Usage
from services.gateway.generation.request import Caller
from services.gateway.telemetry import GatewayMetrics
from services.gateway.tenants.tenant import Admission, Gate, Tenant
from services.gateway.text.codec import ServedModel
from services.gateway.upstream.catalog import Catalog

FALLBACK_HEADER = "x-ryzanstein-fallback-model"


class GeneratingBody(Protocol):
    """What every generating endpoint's body says."""

    @property
    def model(self) -> str | None:
        """The model asked for."""

    @property
    def stream(self) -> bool | None:
        """Whether the answer comes as events."""

    @property
    def priority(self) -> int | None:
        """The priority asked for."""

    @property
    def session(self) -> str:
        """What keeps requests on one worker; empty when the body names nothing."""


Body = TypeVar("Body", bound=GeneratingBody)


@dataclass(frozen=True, slots=True)
class Made:
    """A job and the model it runs on, which is another one than `asked` when that one has no worker."""

    job: Job
    model: ServedModel
    asked: str

    @property
    def fell_back(self) -> bool:
        """Whether another model answers than the one asked for."""
        return self.model.name != self.asked


@dataclass(frozen=True, slots=True)
class Ask(Generic[Body]):
    """A body and who sent it."""

    body: Body
    tenant: Tenant
    session: str = ""
    traceparent: str = ""


class Preparer(Protocol[Body]):
    """What differs between the endpoints."""

    async def decode(self, data: bytes) -> Body:
        """Validate a body; raises :class:`ApiError`."""

    async def prepare(self, body: Body, model: ServedModel, caller: Caller) -> Job:
        """Make a job of it; raises :class:`ApiError`."""


async def permitted_model(catalog: Catalog, name: str, tenant: Tenant) -> ServedModel:
    """The model if the tenant may use it; raises :class:`ApiError` as if it did not exist otherwise."""
    check_permission(name, tenant)
    model = await catalog.find(name, tenant.name)
    check_permission(model.name, tenant)
    return model


def check_permission(name: str, tenant: Tenant) -> None:
    """Raises :class:`ApiError` as if the model did not exist when the tenant may not use it."""
    if name and tenant.models and name not in tenant.models:
        raise unknown_model(name, sorted(tenant.models))


def caller_of(tenant: Tenant, session: str, priority: int | None, traceparent: str = "") -> Caller:
    """On whose behalf a request runs; nobody gets a better priority than the tenant's own."""
    effective = tenant.priority if priority is None else max(priority, tenant.priority)
    return Caller(tenant.name, effective, tenant.weight, session, traceparent)


class JobMaker(Generic[Body]):
    """From a body to a job: the same for REST, WebSocket and gRPC."""

    def __init__(
        self, preparer: Preparer[Body], catalog: Catalog, fallback_model: str, metrics: GatewayMetrics
    ) -> None:
        self._preparer = preparer
        self._catalog = catalog
        self._fallback_model = fallback_model
        self._fallbacks = metrics.fallbacks
        self.decode = preparer.decode

    async def make(self, ask: Ask[Body]) -> Made:
        """A job on the model asked for, or on the fallback model when that one has no worker; raises ApiError."""
        if len(ask.session) > MAX_SESSION_CHARS:
            message = f"`x-session-id` may have at most {MAX_SESSION_CHARS} characters, got {len(ask.session)}."
            raise invalid(message, "x-session-id")
        catalog, fallback, name = self._catalog, self._fallback(ask.tenant), ask.body.model or ""
        try:
            asked = await permitted_model(catalog, name, ask.tenant)
        except ApiError as error:
            if error.code != NO_WORKERS or fallback is None:
                raise
            return await self._make(ask, name, fallback)
        # Requests for an expected model wait first: whoever starts workers must see that they are wanted.
        usable = asked in catalog.available() or catalog.expects(asked.name)
        return await self._make(ask, asked.name, asked if usable else fallback or asked)

    async def fall_back(self, ask: Ask[Body], made: Made, error: ApiError) -> Made:
        """The same job on the fallback model, after `made` has failed with `error` before its first token.

        Raises the error when it is not for want of workers, or there is no other model to fall back to.
        """
        fallback = self._fallback(ask.tenant)
        if error.code != NO_WORKERS or fallback is None or fallback is made.model:
            raise error
        return await self._make(ask, made.asked, fallback)

    def _fallback(self, tenant: Tenant) -> ServedModel | None:
        """The fallback model, if there is one with a worker that the tenant may use."""
        if tenant.models and self._fallback_model not in tenant.models:
            return None
        return next((model for model in self._catalog.available() if model.name == self._fallback_model), None)

    async def _make(self, ask: Ask[Body], asked: str, model: ServedModel) -> Made:
        body = ask.body
        caller = caller_of(ask.tenant, ask.session or body.session, body.priority, ask.traceparent)
        job = await self._preparer.prepare(body, model, caller)
        if model.name != asked:
            self._fallbacks.labels(asked).inc()
        return Made(job, model, asked)


@dataclass(slots=True)
class _Run:
    """Runs jobs for a request that was let in, the second one if the first had no worker."""

    exchange: Exchange
    admission: Admission
    used: Usage = field(default_factory=Usage)

    async def __call__(self, made: Made) -> None:
        """Answer; raises :class:`ApiError`."""
        exchange, job = self.exchange, made.job
        try:
            await self.admission.reserve(job.reserved_tokens())
            exchange.model = made.model.name
            exchange.answer_headers = list(self.admission.headers)
            if made.fell_back:
                exchange.answer_headers.append((FALLBACK_HEADER.encode(), made.model.name.encode()))
            await run(exchange, job)
        finally:
            job.close()
            self.used = job.usage()


class GenerateEndpoint(Generic[Body]):
    """Serves one generating route."""

    def __init__(
        self,
        maker: JobMaker[Body],
        gate: Gate,
        limits: BodyLimits,
        heartbeat_s: float,
    ) -> None:
        self._maker = maker
        self._gate = gate
        self._limits = limits
        self._heartbeat_s = heartbeat_s

    async def serve(self, exchange: Exchange) -> None:
        """Answer; raises :class:`ApiError`, also after a stream has begun."""
        tenant = await self._gate.identify(exchange.authorization)
        data = await exchange.body(self._limits)
        admission = await self._gate.enter(tenant)
        running = _Run(exchange, admission)
        try:
            body = await self._maker.decode(data)
            ask = Ask(body, tenant, exchange.header(b"x-session-id"), exchange.traceparent)
            if body.stream:
                async with Heartbeat(exchange, self._heartbeat_s):
                    await self._make_and_run(running, ask)
            else:
                await self._make_and_run(running, ask)
        finally:
            await admission.settle(running.used)

    async def _make_and_run(self, running: _Run, ask: Ask[Body]) -> None:
        made = await self._maker.make(ask)
        try:
            await running(made)
        except ApiError as error:
            if running.exchange.answering:
                raise
            await running(await self._maker.fall_back(ask, made, error))
