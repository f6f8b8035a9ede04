"""All requests of a gateway over one call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast

import grpc
import pytest
from prometheus_client import CollectorRegistry
from ryzanstein.v1 import routing_pb2 as pb
from ryzanstein.v1 import routing_pb2_grpc, worker_pb2

from services.common.rpc import bind, new_server, open_channel
from services.common.shared_call import Routes, share_routes
from services.gateway.upstream.patience import StartPatience
from services.gateway.upstream.router import NoWorkerError
from services.router.breaker import BreakerLimits
from services.router.fleet import Fleet, UnavailableError
from services.router.metrics import RouterMetrics
from services.router.residency import Residency
from services.router.routing import Placement, Routing
from services.router.scaling.arrivals import Arrivals
from services.router.service import RouterService
from services.router.settings import RouterSettings
from tests.integration.router.conftest import RouterRig, lists, router_client, views
from tests.integration.router.processes import router_process, until

PATIENCE_S = 60.0


def frame(request_id: str, tag: int = 0) -> pb.RouteFrame:
    return pb.RouteFrame(tag=tag, route=pb.RouteRequest(request_id=request_id, prompt_tokens=100, max_tokens=16))


@asynccontextmanager
async def shared_call(router: routing_pb2_grpc.RouterStub) -> AsyncIterator[Routes]:
    routes = share_routes(router)
    yield routes
    await routes.close()


async def test_a_call_ends_when_all_its_requests_are_answered(fleet: RouterRig) -> None:
    worker = await fleet.worker("only", phase=worker_pb2.PHASE_LOADING)
    router = await fleet.router(workers=0, QUEUE_TIMEOUT_S="60")
    await until(lambda: lists(router, "only"))

    async def ask_all() -> list[pb.RouteAnswer]:
        sent = [pb.RouteFrames(frames=[frame(f"r{i}", tag=i)]) for i in range(5)]
        answers = [answer async for message in router.RouteMany(iter(sent)) for answer in message.answers]
        return [answer for answer in answers if answer.WhichOneof("answer")]  # not the heartbeats

    answering = asyncio.ensure_future(ask_all())
    await asyncio.sleep(0.2)
    assert not answering.done(), "all of them wait"
    worker.update(phase=worker_pb2.PHASE_SERVING)
    answers = await answering
    assert sorted(answer.tag for answer in answers) == [0, 1, 2, 3, 4]
    assert {answer.placed.worker_id for answer in answers} == {"only"}
    assert len({answer.placed.ticket.seq for answer in answers}) == 5


@pytest.mark.parametrize("in_time", [True, False])
async def test_rejection_overtakes_queued_requests_and_cancelled_request_takes_no_place(
    fleet: RouterRig, in_time: bool
) -> None:
    worker = await fleet.worker("only", phase=worker_pb2.PHASE_LOADING)
    router = await fleet.router(workers=0, QUEUE_SIZE="1", QUEUE_TIMEOUT_S="60")
    await until(lambda: lists(router, "only"))
    async with shared_call(router) as routes:
        first = routes.ask(frame("first"), PATIENCE_S if in_time else 3.0)
        await asyncio.sleep(0)  # let it ask
        second = await routes.ask(frame("second"), PATIENCE_S)
        assert second.refused.code == grpc.StatusCode.UNAVAILABLE.value[0]
        assert second.refused.message == "no worker serves tiny now (1 loading, the queue is full)"
        assert not first.done()
        if in_time:
            first.cancel()
        else:
            with pytest.raises(TimeoutError):
                await first
        third = await _once_there_is_room(routes)
        worker.update(phase=worker_pb2.PHASE_SERVING)
        assert (await third).placed.worker_id == "only"
        assert (await views(router))["only"].unacknowledged <= 1, "the first was not placed behind its caller's back"


async def _once_there_is_room(routes: Routes) -> asyncio.Future[pb.RouteAnswer]:
    """A request that waits in a queue that may still be full: who finds it full is refused at once."""
    async with asyncio.timeout(60):
        while True:
            waiting = routes.ask(frame("later"), PATIENCE_S)
            done, _ = await asyncio.wait([waiting], timeout=2.0)
            if not done:
                return waiting


async def test_failed_decision_returns_an_error_without_hurting_its_neighbours() -> None:
    class Failing:
        async def route(self, request: pb.RouteRequest) -> Placement:
            if request.request_id == "bad":
                raise KeyError("a mistake of ours")
            raise UnavailableError("nobody")

    fleet = Fleet("router", 30.0, BreakerLimits(), lambda: None)
    metrics = RouterMetrics(CollectorRegistry(), ())
    service = RouterService(
        RouterSettings(), fleet, cast("Routing", Failing()), metrics, Residency(fleet), Arrivals("r")
    )
    server = new_server()
    routing_pb2_grpc.add_RouterServicer_to_server(service, server)
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    async with (
        open_channel(f"127.0.0.1:{port}") as channel,
        shared_call(routing_pb2_grpc.RouterStub(channel)) as routes,
    ):
        bad, good = await asyncio.gather(routes.ask(frame("bad"), PATIENCE_S), routes.ask(frame("good"), PATIENCE_S))
        assert bad.refused.code == grpc.StatusCode.INTERNAL.value[0]
        assert "a mistake of ours" in bad.refused.message
        assert good.refused.code == grpc.StatusCode.UNAVAILABLE.value[0]
        assert not routes.broken
    await server.stop(None)


async def test_a_gateway_less_patient_than_the_queue_hears_that_there_is_no_place(fleet: RouterRig) -> None:
    """And does not take the router for dead, which would send its other requests away."""
    await fleet.worker("only", queued_prefill_tokens=1_000_000)
    service = fleet.process(router_process(fleet.redis_server.url_of("router"), QUEUE_TIMEOUT_S="60"))
    router = await fleet.stub(service)
    await until(lambda: lists(router, "only"))
    async with router_client([service.address], route_timeout_s=5.0, unknown_timeout_s=30.0) as client:
        with pytest.raises(NoWorkerError, match="no worker became free in time") as refused:
            await client.route(pb.RouteRequest(request_id="r", prompt_tokens=100), StartPatience())
    assert not refused.value.pool_empty
