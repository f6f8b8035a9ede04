"""Admission with tenancy on: keys, rate limits, monthly quotas, concurrency."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus

from services.common.keys import RedisKeys
from services.gateway.errors import ApiError
from services.gateway.telemetry import GatewayMetrics
from services.gateway.tenants.hours import WEEK, Hours
from services.gateway.tenants.jwt_tokens import JwtVerifier
from services.gateway.tenants.keys import KeyDirectory, key_of
from services.gateway.tenants.limits import Concurrency, RateLimits, Reservation, Window
from services.gateway.tenants.redis_guard import RedisAwayError, RedisGuard
from services.gateway.tenants.tenant import Tenant
from services.gateway.usage import NANOS, Usage

_OF_ISSUER = "jwt:"  # before a tenant's name, in a credential
_USED_UP = "insufficient_quota"
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
        tokens: JwtVerifier | None = None,
        quota_status: int = HTTPStatus.TOO_MANY_REQUESTS,
        month: Callable[[], str] = lambda: time.strftime("%Y%m", time.gmtime()),
    ) -> None:
        """`tokens`: checks bearer tokens of an issuer; None: only keys are known.

        `quota_status`: status of requests that a monthly quota or budget refuses.
        """
        self._directory = directory
        self._limits = limits
        self._concurrency = concurrency
        self._guard = guard
        self._keys = keys
        self._metrics = metrics
        self._jwt = tokens
        self._quota_status = quota_status
        self._month = month

    async def identify(self, authorization: str) -> Tenant:
        """See :class:`Gate`; raises :class:`ApiError` 403 outside the tenant's hours."""
        key = key_of(authorization)
        issuer = self._jwt if self._jwt and self._jwt.reads(key) else None
        tenant = await (issuer or self._directory).identify(key)
        if tenant.hours and not tenant.hours.contain(time.time()):
            raise _outside(tenant.hours)
        return tenant

    async def credential(self, authorization: str) -> str:
        """See :class:`Gate`."""
        key = key_of(authorization)
        if self._jwt and self._jwt.reads(key):
            return f"{_OF_ISSUER}{(await self._jwt.identify(key)).name}"
        return self._directory.credential(key)

    async def of_credential(self, credential: str) -> Tenant:
        """See :class:`Gate`."""
        if self._jwt and credential.startswith(_OF_ISSUER):
            return self._jwt.of_name(credential.removeprefix(_OF_ISSUER))
        return await self._directory.of_credential(credential)

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
        (reservation, window), (used, spent) = await asyncio.gather(
            self._take(tenant, _TOKENS, missing, tenant.tokens_per_minute), self._of_this_month(tenant)
        )
        if reservation is not None:
            admitted.reserved.append(reservation)
        admitted.headers = [*_headers(_REQUESTS, admitted.requests), *_headers(_TOKENS, window)]
        if tenant.tokens_per_month and used + tokens > tenant.tokens_per_month:
            message = (
                f"The monthly quota of {tenant.tokens_per_month} tokens is used up ({used} used, {tokens} asked for)."
            )
            raise self._refused(_USED_UP, message, "quota", None, admitted.headers)
        if tenant.budget_per_month and spent >= tenant.budget_per_month:
            message = f"The monthly budget of {tenant.budget_per_month:.12g} is used up ({spent:.12g} spent)."
            raise self._refused(_USED_UP, message, "budget", None, admitted.headers)
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
        sent = tuple((name.decode(), value.decode()) for name, value in headers)
        status = self._quota_status if code == _USED_UP else HTTPStatus.TOO_MANY_REQUESTS
        return ApiError(status, message, limit, code=code, retry_after_s=retry_after_s, headers=sent)

    async def settle(self, admitted: _Admitted, usage: Usage) -> None:
        """End a request that used so many tokens: the others of its reservation are free again."""
        tenant, used = admitted.tenant, usage.prompt_tokens + usage.completion_tokens
        self._concurrency.leave(tenant)
        if admitted.reserved:
            unused = admitted.tokens - used
            await self._limits.give_back(tenant, _TOKENS, admitted.reserved[-1], unused, tenant.tokens_per_minute)

    async def _of_this_month(self, tenant: Tenant) -> tuple[int, float]:
        """Tokens and cost of this month; 0 while Redis is away, so that an outage refuses no request."""
        if not (tenant.tokens_per_month or tenant.budget_per_month):
            return 0, 0.0
        client, month = self._guard.client, self._month()
        counters = self._keys.quota(tenant.name, month), self._keys.spent(tenant.name, month)
        try:
            used, spent = await self._guard.run(lambda: client.mget(counters))
        except RedisAwayError:
            return 0, 0.0
        return int(used or 0), int(spent or 0) / NANOS


def _headers(kind: str, window: Window | None) -> list[tuple[bytes, bytes]]:
    if window is None:
        return []
    values = {"limit": str(window.limit), "remaining": str(window.remaining), "reset": f"{math.ceil(window.reset_s)}s"}
    return [(f"x-ratelimit-{name}-{kind}".encode(), value.encode()) for name, value in values.items()]


def _outside(hours: Hours) -> ApiError:
    days = "" if hours.days == WEEK else f" on {', '.join(hours.days)}"
    message = f"This key is valid from {hours.start} to {hours.end} ({hours.timezone}){days}."
    return ApiError(403, message, "permission_error", code="outside_hours")
