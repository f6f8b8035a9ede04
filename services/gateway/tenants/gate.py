"""Admission with tenancy on: keys, rate limits, monthly quotas, concurrency."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from services.common.keys import RedisKeys
from services.gateway.errors import ApiError
from services.gateway.telemetry import GatewayMetrics
from services.gateway.tenants.keys import KeyDirectory, digest_of, key_of
from services.gateway.tenants.limits import Concurrency, RateLimits, Reservation, Window
from services.gateway.tenants.redis_guard import RedisAwayError, RedisGuard
from services.gateway.tenants.tenant import Tenant
from services.gateway.usage import Usage

_QUOTA_KEPT_S = 40 * 24 * 3600
_REQUESTS, _TOKENS = "requests", "tokens"


@dataclass(slots=True)
class _Admitted:
    gate: TenantGate
    tenant: Tenant
    requests: Window | None
    reserved: list[Reservation] = field(default_factory=list)
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return sum(reservation.tokens for reservation in self.reserved)

    async def reserve(self, tokens: int) -> None:
        """See :class:`Permit`."""
        await self.gate.reserve(self, tokens)

    async def settle(self, usage: Usage) -> None:
        """See :class:`Permit`."""
        await self.gate.settle(self, usage)


class TenantGate:
    """A :class:`Gate` for tenants with keys and limits."""

    def __init__(
        self,
        directory: KeyDirectory,
        limits: RateLimits,
        concurrency: Concurrency,
        guard: RedisGuard,
        keys: RedisKeys,
        metrics: GatewayMetrics,
        month: Callable[[], str] = lambda: time.strftime("%Y%m", time.gmtime()),
    ) -> None:
        self._directory = directory
        self._limits = limits
        self._concurrency = concurrency
        self._guard = guard
        self._keys = keys
        self._metrics = metrics
        self._month = month

    async def identify(self, authorization: str) -> Tenant:
        """See :class:`Gate`."""
        return await self._directory.identify(authorization)

    def credential(self, authorization: str) -> str:
        """See :class:`Gate`."""
        return digest_of(key_of(authorization))

    async def of_credential(self, credential: str) -> Tenant:
        """See :class:`Gate`."""
        return await self._directory.of_digest(credential)

    async def enter(self, tenant: Tenant) -> _Admitted:
        """See :class:`Gate`."""
        if not self._concurrency.enter(tenant):
            message = f"Too many requests at once; this key may run {tenant.max_concurrent}."
            raise self._refused("concurrency", message, "concurrency", 1.0)
        try:
            _, requests = await self._take(tenant, _REQUESTS, 1, tenant.requests_per_minute)
            if requests is not None and requests.refused:
                message = f"Rate limit reached: {requests.limit} requests per minute."
                raise self._refused(
                    "rate_limit_exceeded", message, _REQUESTS, requests.reset_s, _headers(_REQUESTS, requests)
                )
            admitted = _Admitted(self, tenant, requests)
            await self.reserve(admitted, 1)  # refuse a tenant without tokens before its prompt is processed
        except BaseException:  # includes a cancellation by a disconnect
            self._concurrency.leave(tenant)
            raise
        return admitted

    async def reserve(self, admitted: _Admitted, tokens: int) -> None:
        """Raise the reservation to `tokens` in the tenant's window; raises :class:`ApiError` 429."""
        tenant, missing = admitted.tenant, max(0, tokens - admitted.tokens)
        (reservation, window), used = await asyncio.gather(
            self._take(tenant, _TOKENS, missing, tenant.tokens_per_minute), self._used_this_month(tenant)
        )
        if reservation is not None:
            admitted.reserved.append(reservation)
        admitted.headers = [*_headers(_REQUESTS, admitted.requests), *_headers(_TOKENS, window)]
        if tenant.tokens_per_month and used + tokens > tenant.tokens_per_month:
            message = (
                f"The monthly quota of {tenant.tokens_per_month} tokens is used up ({used} used, {tokens} asked for)."
            )
            raise self._refused("insufficient_quota", message, "quota", None, admitted.headers)
        if window is not None and window.refused:
            message = f"Rate limit reached: {window.limit} tokens per minute, this request reserves {tokens}."
            raise self._refused("rate_limit_exceeded", message, _TOKENS, window.reset_s, admitted.headers)

    async def _take(
        self, tenant: Tenant, kind: str, amount: int, limit: int
    ) -> tuple[Reservation | None, Window | None]:
        return await self._limits.take(tenant, kind, amount, limit) if limit else (None, None)

    def _refused(
        self,
        code: str,
        message: str,
        limit: str,
        retry_after_s: float | None,
        headers: Sequence[tuple[bytes, bytes]] = (),
    ) -> ApiError:
        self._metrics.limited.labels(limit).inc()
        told = tuple((name.decode(), value.decode()) for name, value in headers)
        return ApiError(429, message, limit, code=code, retry_after_s=retry_after_s, headers=told)

    async def settle(self, admitted: _Admitted, usage: Usage) -> None:
        """Count the tokens that a request used."""
        tenant, used = admitted.tenant, usage.prompt_tokens + usage.completion_tokens
        self._concurrency.leave(tenant)
        if admitted.reserved:
            unused = admitted.tokens - used
            await self._limits.give_back(tenant, _TOKENS, admitted.reserved[-1], unused, tenant.tokens_per_minute)
        if tenant.tokens_per_month and used:
            await self._count_month(tenant, used)

    async def _used_this_month(self, tenant: Tenant) -> int:
        """Tokens used this month; 0 while Redis is away, so that an outage refuses no request."""
        if not tenant.tokens_per_month:
            return 0
        client, key = self._guard.client, self._keys.quota(tenant.name, self._month())
        try:
            return int(await self._guard.run(lambda: client.get(key)) or 0)
        except RedisAwayError:
            return 0

    async def _count_month(self, tenant: Tenant, used: int) -> None:
        key = self._keys.quota(tenant.name, self._month())

        async def count() -> None:
            async with self._guard.client.pipeline(transaction=False) as pipe:
                pipe.incrby(key, used)
                pipe.expire(key, _QUOTA_KEPT_S)
                await pipe.execute()

        try:
            await self._guard.run(count)
        except RedisAwayError:
            self._metrics.unaccounted.inc(used)


def _headers(kind: str, window: Window | None) -> list[tuple[bytes, bytes]]:
    if window is None:
        return []
    values = {"limit": str(window.limit), "remaining": str(window.remaining), "reset": f"{math.ceil(window.reset_s)}s"}
    return [(f"x-ratelimit-{name}-{kind}".encode(), value.encode()) for name, value in values.items()]
