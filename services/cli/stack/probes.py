"""Probes of readiness and liveness: each probe asks the process itself.

Probes of readiness run many times a second during the start, on cores that the starting processes need. So they are
cheap and keep their connections.
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
_LIVENESS_TIMEOUT_S = 3.0  # on a busy machine an answer is slow
_SILENT = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


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


def grpc_serving(address: str) -> Probe:
    """Ready once grpc.health.v1 returns SERVING."""
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


def grpc_alive(address: str) -> Probe:
    """Alive if grpc.health.v1 returns any answer, since it comes from the event loop."""

    async def probe() -> bool:
        async with open_channel(address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            request = health_pb2.HealthCheckRequest()
            try:
                await stub.Check(request, timeout=_LIVENESS_TIMEOUT_S)  # type: ignore[attr-defined]
            except grpc.aio.AioRpcError as error:
                return error.code() not in _SILENT
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
