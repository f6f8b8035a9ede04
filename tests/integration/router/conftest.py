from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path

import pytest
import redis.asyncio as redis
from ryzanstein.v1 import routing_pb2 as pb
from ryzanstein.v1 import routing_pb2_grpc

from services.common.keys import RedisKeys
from services.common.router_addresses import RouterAddresses
from services.common.rpc import open_channel
from services.common.tasks import end_tasks
from services.gateway.upstream.router import RouterClient
from tests.integration.router.config_maps import ConfigMaps, running_config_maps
from tests.integration.router.fake_worker import FakeWorker
from tests.integration.router.processes import KillableRedis, Service, router_process, until


class RouterRig:
    """Fake workers with leases, router processes in front of them, stubs to talk to those."""

    def __init__(self, server: KillableRedis, stack: AsyncExitStack, processes: ExitStack) -> None:
        self.redis_server = server
        self.redis = redis.from_url(server.url)
        self.keys = RedisKeys("default")
        self._stack = stack
        self._processes = processes

    async def worker(self, worker_id: str, **state: object) -> FakeWorker:
        worker = FakeWorker(worker_id)
        worker.update(**state)
        await worker.start(self.redis, self.keys)
        self._stack.push_async_callback(worker.stop)
        return worker

    def process(self, service: Service) -> Service:
        self._processes.callback(service.end)
        return service

    async def stub(self, service: Service) -> routing_pb2_grpc.RouterStub:
        return routing_pb2_grpc.RouterStub(await self._stack.enter_async_context(open_channel(service.address)))

    async def router(self, *, workers: int, **environment: str) -> routing_pb2_grpc.RouterStub:
        """A router that has found `workers` eligible workers."""
        # Time-outs are for the bench: on a shared machine fifty milliseconds may pass for any reason.
        environment.setdefault("REDIS_TIMEOUT_MS", "5000")
        stub = await self.stub(self.process(router_process(self.redis_server.url_of("router"), **environment)))
        await until(lambda: eligible(stub, workers))
        return stub


@contextlib.asynccontextmanager
async def router_client(addresses: Sequence[str], **limits: float) -> AsyncIterator[RouterClient]:
    """A gateway's client that knows its routers."""
    client = RouterClient(RouterAddresses(addresses), **limits)
    following = asyncio.create_task(client.follow_routers(60))
    await asyncio.sleep(0.05)
    yield client
    await end_tasks([following])
    await client.close()


def ask(request_id: str = "r", **fields: object) -> pb.RouteRequest:
    return pb.RouteRequest(**{"request_id": request_id, "prompt_tokens": 100, "max_tokens": 16, **fields})  # type: ignore[arg-type]


async def views(stub: routing_pb2_grpc.RouterStub) -> dict[str, pb.WorkerView]:
    return {view.worker_id: view for view in (await stub.ListWorkers(pb.ListWorkersRequest())).workers}


async def eligible(stub: routing_pb2_grpc.RouterStub, n: int) -> bool:
    return sum(view.eligible for view in (await views(stub)).values()) == n


async def lists(stub: routing_pb2_grpc.RouterStub, worker_id: str) -> bool:
    """Whether the router has heard from the worker: it knows of the lease before the first state."""
    view = (await views(stub)).get(worker_id)
    return view is not None and view.why_not != "state stream broken"


@pytest.fixture
async def fleet(redis_server: KillableRedis) -> AsyncIterator[RouterRig]:
    with ExitStack() as processes:
        async with AsyncExitStack() as stack:
            fleet = RouterRig(redis_server, stack, processes)
            yield fleet
        await fleet.redis.aclose()


@pytest.fixture
def config_maps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ConfigMaps]:
    with running_config_maps(tmp_path / "account") as server:
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "localhost")
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(server.server_port))
        yield server
