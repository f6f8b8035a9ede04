"""`ryzanstein kube drain-worker` as far as the router: it waits until the worker has nothing left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import redis.asyncio as redis
from ryzanstein.v1 import routing_pb2_grpc

from services.cli.errors import CommandError
from services.cli.kube.workers import empty
from services.common.keys import RedisKeys
from services.common.rpc import open_channel
from tests.integration.router.conftest import eligible
from tests.integration.router.fake_worker import FakeWorker
from tests.integration.router.processes import KillableRedis, router_process, running, until

POD = "ryzanstein-workers-default-0"


@pytest.fixture(params=[POD, f"{POD}.1"], ids=["one model", "one of several models"])
async def worker(redis_server: KillableRedis, request: pytest.FixtureRequest) -> AsyncIterator[FakeWorker]:
    client = redis.from_url(redis_server.url)
    actual = FakeWorker(request.param)
    actual.update(running=2)
    await actual.start(client, RedisKeys("default"))
    yield actual
    await actual.stop()
    await client.aclose()


async def test_drain_command_waits_for_the_last_request(redis_server: KillableRedis, worker: FakeWorker) -> None:
    async def told() -> bool:
        return bool(worker.drains)

    with running(router_process(redis_server.url_of("router"), REDIS_TIMEOUT_MS="5000")) as router:
        async with open_channel(router.address) as channel:
            stub = routing_pb2_grpc.RouterStub(channel)
            await until(lambda: eligible(stub, 1))
        draining = asyncio.create_task(empty(router.address, POD, 20))
        await until(told)
        await asyncio.sleep(1.0)  # the next look at what it runs
        assert worker.drains == [20_000]
        assert not draining.done(), "two requests are running"
        worker.update(running=0)
        await draining
        with pytest.raises(CommandError, match=f"knows no worker other, only {worker.worker_id}"):
            await empty(router.address, "other", 1)
