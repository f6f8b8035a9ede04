"""A router whose process is stopped: gateways hear no heartbeat, and ask the next one."""

from __future__ import annotations

import asyncio
import logging
import signal
import time

import pytest
from ryzanstein.v1 import routing_pb2 as pb
from ryzanstein.v1 import routing_pb2_grpc

from services.gateway.upstream.patience import StartPatience
from services.gateway.upstream.router import NoWorkerError, RouterClient
from tests.integration.router.conftest import RouterRig, eligible, router_client, views
from tests.integration.router.processes import Service, router_process, until


async def route(client: RouterClient) -> float:
    """How long a decision took, seconds."""
    began = time.monotonic()
    await client.route(pb.RouteRequest(request_id="r", model="tiny", prompt_tokens=10), StartPatience())
    return time.monotonic() - began


@pytest.fixture
async def routers(fleet: RouterRig) -> list[tuple[Service, routing_pb2_grpc.RouterStub]]:
    """Two that know a worker."""
    started = [
        fleet.process(router_process(fleet.redis_server.url_of("router"), QUEUE_TIMEOUT_S="3")) for _ in range(2)
    ]
    await fleet.worker("w")
    actual = [(router, await fleet.stub(router)) for router in started]
    for _, stub in actual:
        await until(lambda stub=stub: eligible(stub, 1))  # type: ignore[misc]
    return actual


async def test_next_router_is_called_while_a_router_is_stalled(
    routers: list[tuple[Service, routing_pb2_grpc.RouterStub]], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "services.gateway.upstream.router")
    addresses = [router.address for router, _ in routers]
    async with router_client(addresses, route_timeout_s=60.0, unknown_timeout_s=6.0) as client:
        assert await route(client) < 5.9
        (stopped,) = [router for router, stub in routers if (await views(stub))["w"].unacknowledged]
        stopped.process.send_signal(signal.SIGSTOP)
        try:
            times = await asyncio.gather(*(route(client) for _ in range(8)))
            assert 5.9 < max(times) < 50, "long before it would be late"
            times = [await route(client) for _ in range(8)]
            assert max(times) < 5.9, "it is left alone, although its connection looks good"
        finally:
            stopped.process.send_signal(signal.SIGCONT)

        async def back() -> bool:
            return f"router {stopped.address} answers again" in caplog.messages

        await until(back)


async def test_a_router_that_lets_a_request_wait_is_not_silent(
    fleet: RouterRig, caplog: pytest.LogCaptureFixture
) -> None:
    await fleet.worker("w", queued_prefill_tokens=10_000_000)
    router = fleet.process(router_process(fleet.redis_server.url_of("router"), QUEUE_TIMEOUT_S="3"))
    async with router_client([router.address], route_timeout_s=35.0, unknown_timeout_s=1.0) as client:
        began = time.monotonic()
        with pytest.raises(NoWorkerError, match="no worker became free in time"):
            await route(client)
        assert 2.5 < time.monotonic() - began < 30
    assert "does not answer" not in caplog.text
