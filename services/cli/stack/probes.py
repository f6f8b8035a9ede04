"""Probes of readiness and liveness: each probe asks the process itself.

Probes of readiness run many times a second during the start, on cores that the starting processes need. So they are
cheap and keep their connections.
"""

from __future__ import annotations

import httpx
import redis.asyncio as redis
from redis.exceptions import RedisError

from services.common.processes.process import Probe

_TIMEOUT_S = 1.0
_LIVENESS_TIMEOUT_S = 3.0  # on a busy machine an answer is slow


def redis_ready(url: str, timeout_s: float = _TIMEOUT_S) -> Probe:
    """Ready once Redis answers PING."""

    async def probe() -> bool:
        client = redis.from_url(url, socket_timeout=timeout_s, socket_connect_timeout=timeout_s)
        try:
            await client.ping()
        except (RedisError, OSError):
            return False
        finally:
            await client.aclose()
        return True

    return probe


def redis_alive(url: str) -> Probe:
    """Alive if Redis answers PING."""
    return redis_ready(url, _LIVENESS_TIMEOUT_S)


def http_alive(url: str) -> Probe:
    """Alive if `url` answers 200."""
    return http_ready(url, _LIVENESS_TIMEOUT_S)


def http_ready(url: str, timeout_s: float = _TIMEOUT_S) -> Probe:
    """Ready once `url` answers 200."""

    async def probe() -> bool:
        # The loopback has no TLS: loading certificates would cost more than the request.
        async with httpx.AsyncClient(trust_env=False, verify=False, timeout=timeout_s) as client:
            try:
                return (await client.get(url)).status_code == httpx.codes.OK
            except httpx.HTTPError:
                return False

    return probe
