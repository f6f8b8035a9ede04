"""Routers behind a name come and go, and every gateway knows."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest
from pydantic import ValidationError
from ryzanstein.v1 import routing_pb2

from services.common.router_addresses import RouterAddresses
from services.gateway.settings import GatewaySettings
from services.gateway.upstream import router
from services.gateway.upstream.patience import StartPatience
from services.gateway.upstream.router import RouterClient
from services.router.settings import RouterSettings
from tests.integration.gateway.fleet import Worker
from tests.integration.gateway.gateways import GatewayStack, eventually, running_stack
from tests.integration.gateway.placing import PlacingRouter

PORT = 50052


class Name:
    """A name and what it stands for, as a resolver would say."""

    def __init__(self, *behind: str) -> None:
        self.behind: Sequence[str] | None = behind
        self.asked = 0

    async def resolve(self, host: str, port: int) -> Sequence[str]:
        assert (host, port) == ("routers.test", PORT)
        self.asked += 1
        if self.behind is None:
            raise OSError("temporary failure in name resolution")
        return self.behind


@asynccontextmanager
async def routers() -> AsyncIterator[tuple[PlacingRouter, PlacingRouter]]:
    worker = Worker("w0")
    one, two = PlacingRouter([worker]), PlacingRouter([worker])
    await one.start()
    await two.start()
    yield one, two
    await one.stop()
    await two.stop()


async def route(client: RouterClient, session: str = "", tenant: str = "") -> None:
    request = routing_pb2.RouteRequest(request_id="r", model="test-model", session=session, tenant=tenant)
    await client.route(request, StartPatience())


@asynccontextmanager
async def following(name: Name) -> AsyncIterator[RouterClient]:
    addresses = RouterAddresses([f"dns:routers.test:{PORT}"], name.resolve)
    client = RouterClient(addresses, route_timeout_s=5, unknown_timeout_s=0.5)
    task = asyncio.create_task(client.follow_routers(0.02))
    await eventually(lambda: name.asked > 1)
    yield client
    task.cancel()
    await client.close()


async def routed(client: RouterClient, *to: PlacingRouter) -> list[int]:
    """How many of ten requests each router has decided."""
    before = [len(router.routes) for router in to]
    for _ in range(10):
        await route(client)
    return [len(router.routes) - count for router, count in zip(to, before, strict=True)]


async def test_new_routers_are_used_and_removed_routers_are_dropped() -> None:
    async with routers() as (one, two):
        name = Name(one.address)
        async with following(name) as client:
            assert await routed(client, one, two) == [10, 0]
            name.behind, sent = (two.address,), name.asked
            await eventually(lambda: name.asked > sent + 1)
            assert await routed(client, one, two) == [0, 10]
            name.behind, sent = None, name.asked
            await eventually(lambda: name.asked > sent + 1)
            assert await routed(client, one, two) == [0, 10], "a name that is not resolved stands for what it did"


async def test_all_gateways_ask_the_same_router_about_a_session_and_the_next_router_after_a_stop() -> None:
    async with routers() as (one, two):
        names = Name(one.address, two.address), Name(two.address, one.address)
        async with following(names[0]) as here, following(names[1]) as there:
            for number in range(40):
                for client in (here, there, there):
                    await route(client, session=f"s{number // 2}", tenant=f"t{number % 2}")
            sent = [Counter((each.tenant, each.session) for each in router.routes) for router in (one, two)]
            assert not sent[0].keys() & sent[1].keys()
            assert all(sent), "sessions spread"
            assert {*sent[0].values(), *sent[1].values()} == {3}
            await one.stop()
            for tenant, session in sent[0]:
                await route(here, session, tenant)
            assert {(each.tenant, each.session) for each in two.routes} == sent[0].keys() | sent[1].keys()


async def test_every_router_behind_the_name_gets_the_reports() -> None:
    async with routers() as (one, two):
        name = Name(one.address)
        async with following(name) as client:
            client.report(routing_pb2.Outcome(request_id="a"))
            await eventually(lambda: one.outcomes)
            name.behind, sent = (one.address, two.address), name.asked
            await eventually(lambda: name.asked > sent + 1)
            client.report(routing_pb2.Outcome(request_id="b"))
            await eventually(lambda: two.outcomes and len(one.outcomes) == 2)
            assert [outcome.request_id for outcome in two.outcomes] == ["b"]


async def test_loop_that_follows_routers_ends_when_sending_reports_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the gateway ends, and does not leave the routers without reports."""

    async def fail(endpoint: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(router, "_send_reports", fail)
    client = RouterClient(RouterAddresses(["127.0.0.1:1"]), route_timeout_s=5)
    try:
        with pytest.raises(ExceptionGroup):
            await asyncio.wait_for(client.follow_routers(), 30)
    finally:
        await client.close()


async def test_a_gateway_finds_its_router_by_name(stack: GatewayStack) -> None:
    name = f"dns:localhost:{stack.router.port}"
    async with running_stack([], router_addresses=name) as other:
        await eventually(lambda: other.gateway.catalog.available())
        assert (await other.complete(prompt="a", max_tokens=1)).status_code == 200
        assert stack.router.routes


@pytest.mark.parametrize("addresses", ["dns:", "dns:host", "dns:host:0", "host", "a:1,dns:http://b:2"])
def test_an_address_that_is_none_is_named(addresses: str) -> None:
    with pytest.raises(ValidationError, match=r"router_addresses(.|\n)*must be host:port"):
        GatewaySettings(router_addresses=addresses)
    with pytest.raises(ValidationError, match=r"router_peers(.|\n)*must be host:port"):
        RouterSettings(router_peers=addresses)
