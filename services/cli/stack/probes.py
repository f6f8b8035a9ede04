"""How a process is known to be ready: each probe asks the process itself.

Probes run many times a second while everything starts, on the cores that the starting processes need: they keep their
connections and do no more than they must.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import grpc
import httpx
import redis.asyncio as redis
from grpc_health.v1 import health_pb2, health_pb2_grpc
from redis.exceptions import RedisError

from services.common.rpc import open_channel

Probe = Callable[[], Awaitable[bool]]
_TIMEOUT_S = 1.0


def redis_ready(url: str) -> Probe:
    """True once Redis answers PING."""

    async def probe() -> bool:
        client = redis.from_url(url, socket_timeout=_TIMEOUT_S, socket_connect_timeout=_TIMEOUT_S)
        try:
            await client.ping()
        except (RedisError, OSError):
            return False
        finally:
            await client.aclose()
        return True

    return probe


def grpc_serving(address: str) -> Probe:
    """True once grpc.health.v1 says SERVING."""
    channels: list[grpc.aio.Channel] = []

    async def probe() -> bool:
        if not channels:
            channels.append(open_channel(address))
        stub = health_pb2_grpc.HealthStub(channels[0])
        try:
            answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=_TIMEOUT_S)  # type: ignore[attr-defined]
        except grpc.aio.AioRpcError:
            return False
        serving = bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
        if serving:
            await channels.pop().close()
        return serving

    return probe


def http_ready(url: str) -> Probe:
    """True once `url` answers 200."""

    async def probe() -> bool:
        # Loopback without TLS: loading the certificates would cost more than the request.
        async with httpx.AsyncClient(trust_env=False, verify=False, timeout=_TIMEOUT_S) as client:
            try:
                return (await client.get(url)).status_code == httpx.codes.OK
            except httpx.HTTPError:
                return False

    return probe
