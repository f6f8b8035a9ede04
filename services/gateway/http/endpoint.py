"""Serves a route with JSON bodies: admission, decoding, limits, answer."""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

from services.gateway.api.ignored import Ignored
from services.gateway.generation.admitted import AdmittedRequest
from services.gateway.generation.entrance import Entrance
from services.gateway.generation.waiting import PATIENCE_HEADER
from services.gateway.http.exchange import BodyLimits, Exchange

_PATIENCE = PATIENCE_HEADER.encode()
Body = TypeVar("Body")


class Endpoint(Protocol):
    """A hot route, which is served without FastAPI."""

    async def serve(self, exchange: Exchange) -> None:
        """Answer a request; raises :class:`ApiError`, also after a stream has begun."""


class Handler(Protocol[Body]):
    """The part in which JSON routes differ."""

    async def decode(self, data: bytes, ignored: Ignored) -> Body:
        """Validate a body without what `ignored` collects; raises :class:`ApiError`."""

    async def answer(self, exchange: Exchange, body: Body, request: AdmittedRequest) -> None:
        """Answer an admitted request; raises :class:`ApiError`."""


class JsonEndpoint(Generic[Body]):
    """Serves a handler."""

    def __init__(self, entrance: Entrance, limits: BodyLimits, handler: Handler[Body]) -> None:
        self._entrance = entrance
        self._limits = limits
        self._handler = handler

    async def serve(self, exchange: Exchange) -> None:
        """See :class:`Endpoint`."""
        tenant = await self._entrance.gate.identify(exchange.authorization)
        data = await exchange.body(self._limits)
        async with self._entrance.admit(tenant, exchange.header(_PATIENCE)) as request:
            exchange.ignored = request.ignored
            await self._handler.answer(exchange, await self._handler.decode(data, request.ignored), request)
