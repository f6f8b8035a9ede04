from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

import pytest

from services.common.ports import free_port
from services.compute.ranks.config import RankGroupConfig
from services.worker.main import serve
from services.worker.native.opening import open_native
from services.worker.settings import WorkerSettings
from tests.integration.router.processes import KillableRedis
from tests.integration.worker_server.fake_group import FakeGroup
from tests.integration.worker_server.gateway import FakeGateway
from tests.models import BUNDLED_MODEL


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    server = KillableRedis(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server.url_of("worker")
    server.kill()


@dataclass
class RunningWorker:
    """A server in this process on fake ranks."""

    address: str
    group: FakeGroup
    stop: asyncio.Event
    task: asyncio.Task[None]
    settings: WorkerSettings


@asynccontextmanager
async def running_worker(
    redis_url: str, *, hold_start: bool = False, **settings: object
) -> AsyncIterator[RunningWorker]:
    port = settings.get("worker_port", free_port())
    chosen = WorkerSettings(
        **{
            "model": str(BUNDLED_MODEL),
            "worker_id": f"w{port}",
            "worker_port": port,
            "redis_url": redis_url,
            "kv_tokens": 1024,
            "max_model_len": 256,
            "max_running": 8,
            "drain_s": 0.2,
            **settings,
        }
    )
    groups: list[FakeGroup] = []

    def make(config: RankGroupConfig) -> FakeGroup:
        groups.append(FakeGroup(config))
        if hold_start:
            groups[0].may_start.clear()
        return groups[0]

    stop = asyncio.Event()
    task = asyncio.create_task(serve(chosen, stop, partial(open_native, make_ranks=make)))
    while not groups:
        await asyncio.sleep(0.01)
        if task.done():
            task.result()
    yield RunningWorker(f"127.0.0.1:{port}", groups[0], stop, task, chosen)
    stop.set()
    await asyncio.wait_for(task, 60)


@pytest.fixture
async def worker(redis_url: str) -> AsyncIterator[RunningWorker]:
    async with running_worker(redis_url) as running:
        yield running


@pytest.fixture
async def gateway(worker: RunningWorker) -> AsyncIterator[FakeGateway]:
    """A connection to the worker, which serves."""
    async with FakeGateway(worker.address) as gateway:
        await gateway.wait_serving()
        yield gateway
