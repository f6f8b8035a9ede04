"""A router whose process is stopped: gateways hear no heartbeat, and ask the next one."""

from __future__ import annotations

import asyncio
import signal
import time

import pytest
from ryzanstein.v1 import routing_pb2 as pb

from services.gateway.upstream.router import NoWorkerError, RouterClient
from tests.integration.router.conftest import RouterRig, eligible, router_client
from tests.integration.router.processes import Service, router_process, until


async def route(client: RouterClient) -> float:
    """How long a decision took, seconds."""
    began = time.monotonic()
    await client.route(pb.RouteRequest(request_id="r", model="tiny", prompt_tokens=10))
    return time.monotonic() - began


@pytest.fixture
async def routers(fleet: RouterRig) -> list[Service]:
    """Two that know a worker."""
    started = [fleet.process(router_process(fleet.redis_server.url, QUEUE_TIMEOUT_S="3")) for _ in range(2)]
    await fleet.worker("w")
    for router in started:
        stub = await fleet.stub(router)
        await until(lambda stub=stub: eligible(stub, 1))  # type: ignore[misc]
    return started


async def test_the_next_router_is_asked_while_one_stands_still(routers: list[Service]) -> None:
    addresses = [router.address for router in routers]
    async with router_client(addresses, route_timeout_s=35.0, unknown_timeout_s=1.0) as client:
        assert await route(client) < 1
        (used,) = [endpoint for endpoint in client._endpoints if endpoint.routes is not None]
        stopped = next(router for router in routers if router.address == used.address)
        stopped.process.send_signal(signal.SIGSTOP)
        try:
            times = await asyncio.gather(*(route(client) for _ in range(8)))
            assert 0.9 < max(times) < 2.5
            times = [await route(client) for _ in range(8)]
            assert max(times) < 0.5, "it is left alone, although its connection looks good"
        finally:
            stopped.process.send_signal(signal.SIGCONT)

        async def back() -> bool:
            return not used.silent

        await until(back, 10)


async def test_a_router_that_lets_a_request_wait_is_not_silent(fleet: RouterRig) -> None:
    await fleet.worker("w", queued_prefill_tokens=10_000_000)
    router = fleet.process(router_process(fleet.redis_server.url, QUEUE_TIMEOUT_S="3"))
    async with router_client([router.address], route_timeout_s=35.0, unknown_timeout_s=1.0) as client:
        began = time.monotonic()
        with pytest.raises(NoWorkerError, match="no worker became free in time"):
            await route(client)
        assert 2.5 < time.monotonic() - began < 6
        assert not client._endpoints[0].silent
