"""Rate limits in requests and tokens per minute: shared through Redis, local while Redis is away."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from limits import RateLimitItemPerMinute
from limits.aio.storage import MemoryStorage, RedisStorage, Storage
from limits.aio.strategies import FixedWindowRateLimiter

from services.gateway.tenants.redis_guard import RedisAwayError, RedisGuard
from services.gateway.tenants.tenant import Tenant

_WINDOW_S = 60


@dataclass(frozen=True, slots=True)
class Window:
    """The rest of a limit, for the x-ratelimit headers."""

    limit: int
    remaining: int
    reset_s: float
    refused: bool


@dataclass(frozen=True, slots=True)
class Reservation:
    """Tokens taken from a window before the used number is known."""

    storage: Storage
    tokens: int
    taken_at: float


class RateLimits:
    """Enforces tenants' limits; while Redis is away, each of `replicas` gateways allows an equal share."""

    def __init__(self, guard: RedisGuard, prefix: str, replicas: Callable[[], int]) -> None:
        self._guard = guard
        self._replicas = replicas
        self._local = MemoryStorage()
        # `limits` would build a client from a URL; this pool has our time-outs.
        self._shared = RedisStorage(
            "async+redis://",
            implementation="redispy",
            key_prefix=prefix,
            connection_pool=guard.client.connection_pool,  # type: ignore[arg-type]  # accepted, though not in the signature
        )

    async def take(self, tenant: Tenant, kind: str, amount: int, limit: int) -> tuple[Reservation | None, Window]:
        """Take `amount` from the window of `kind`; without a reservation if the limit refuses it."""
        try:
            return await self._guard.run(lambda: self._take(self._shared, tenant, kind, amount, limit))
        except RedisAwayError:
            return await self._take(self._local, tenant, kind, amount, max(1, limit // self._replicas()))

    async def give_back(self, tenant: Tenant, kind: str, reservation: Reservation, amount: int, limit: int) -> None:
        """Return unused tokens, unless their window is over; a negative amount takes more."""
        if amount == 0 or time.monotonic() - reservation.taken_at >= _WINDOW_S:
            return
        key = RateLimitItemPerMinute(limit).key_for(tenant.name, kind)
        storage = reservation.storage
        if storage is self._local:
            await storage.incr(key, _WINDOW_S, amount=-amount)
            return
        try:
            await self._guard.run(lambda: storage.incr(key, _WINDOW_S, amount=-amount))
        except RedisAwayError:
            return  # the window expires within a minute

    @staticmethod
    async def _take(
        storage: Storage, tenant: Tenant, kind: str, amount: int, limit: int
    ) -> tuple[Reservation | None, Window]:
        limiter, item = FixedWindowRateLimiter(storage), RateLimitItemPerMinute(limit)
        allowed = await limiter.hit(item, tenant.name, kind, cost=amount)
        if not allowed:  # a refused request must not count
            await storage.incr(item.key_for(tenant.name, kind), _WINDOW_S, amount=-amount)
        reset, remaining = await limiter.get_window_stats(item, tenant.name, kind)
        window = Window(limit, remaining, max(0.0, reset - time.time()), not allowed)
        return (Reservation(storage, amount, time.monotonic()) if allowed else None), window


class Concurrency:
    """Counts each tenant's running requests in this process; gateways share the limit evenly."""

    def __init__(self, replicas: Callable[[], int]) -> None:
        self._replicas = replicas
        self._running: dict[str, int] = {}

    def enter(self, tenant: Tenant) -> bool:
        """Count a request that starts, unless the tenant runs too many."""
        running = self._running.get(tenant.name, 0)
        if tenant.max_concurrent and running >= max(1, tenant.max_concurrent // self._replicas()):
            return False
        self._running[tenant.name] = running + 1
        return True

    def leave(self, tenant: Tenant) -> None:
        """Count a request that ends."""
        self._running[tenant.name] -= 1
        if not self._running[tenant.name]:
            del self._running[tenant.name]
