"""Redis with a deadline and a circuit breaker, which bound a gateway's wait for Redis."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import redis.asyncio as redis
from redis.asyncio.client import Pipeline
from redis.exceptions import RedisError, WatchError

from services.common.redis_client import RedisAccess
from services.common.redis_outage import RedisOutage
from services.gateway.errors import ApiError
from services.gateway.telemetry import GatewayMetrics

log = logging.getLogger(__name__)

T = TypeVar("T")

_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 10.0
_TRIES = 5  # tries of a change that conflicts with concurrent ones


class RedisAwayError(Exception):
    """Redis does not answer; the caller uses its degraded mode."""


class RedisGuard:
    """Runs operations on Redis. After a failure it pauses; each further failure doubles the pause."""

    def __init__(
        self,
        client: redis.Redis,
        access: RedisAccess,
        timeout_s: float,
        metrics: GatewayMetrics,
        consequence: str = "limits are local until it is back",
    ) -> None:
        """`consequence`: the effect of an outage, for the log."""
        self.client = client
        self._timeout_s = timeout_s
        self._metrics = metrics
        self._outage = RedisOutage(log, access, consequence)
        self._pause_s = 0.0
        self._open_until = 0.0

    async def run(self, operation: Callable[[], Awaitable[T]]) -> T:
        """Run an operation; raises :class:`RedisAwayError`."""
        if time.monotonic() < self._open_until:
            raise RedisAwayError("the breaker is open")
        began = time.monotonic()
        try:
            async with asyncio.timeout(self._timeout_s):
                result = await operation()
        except (RedisError, OSError, TimeoutError) as error:
            self._failed(error)
            raise RedisAwayError(str(error)) from error
        finally:
            self._metrics.redis_seconds.observe(time.monotonic() - began)
        self._outage.ended()
        self._pause_s = 0.0
        self._metrics.redis_up.set(1)
        return result

    async def change(self, keys: Sequence[str], subject: str, attempt: Callable[[Pipeline], Awaitable[T]]) -> T:
        """Run the commands that `attempt` queues, again if others have changed one of the `keys` meanwhile.

        Raises RedisAwayError, and :class:`ApiError` 409 while others keep changing the `subject`.
        """

        async def transaction() -> T | None:
            async with self.client.pipeline() as pipe:
                await pipe.watch(*keys)
                result = await attempt(pipe)
                try:
                    await pipe.execute()
                except WatchError:
                    return None
                return result

        for _ in range(_TRIES):
            result = await self.run(transaction)
            if result is not None:
                return result
        message = f"{subject} is being changed by others. Try again."
        raise ApiError(409, message, "invalid_request_error", code="conflict", retry_after_s=1)

    def skip_pause(self) -> None:
        """Let the next operation try Redis at once, for one that cannot come later."""
        self._open_until = 0.0

    def _failed(self, error: Exception) -> None:
        self._outage.failed(error)
        self._pause_s = min(2 * self._pause_s or _FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        self._open_until = time.monotonic() + self._pause_s
        self._metrics.redis_up.set(0)
