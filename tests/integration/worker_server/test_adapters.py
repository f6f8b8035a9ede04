"""Requests whose adapters are still being loaded: what becomes of them when they or their ranks go."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from ryzanstein.v1 import worker_pb2 as pb

from services.common.lifecycle import StartupError
from services.common.ports import free_port
from services.compute.model.adapters.served import read_adapter
from services.compute.model.registry import describe
from tests.adapters import write_adapter
from tests.integration.worker_server.conftest import RunningWorker, running_worker
from tests.integration.worker_server.gateway import FakeGateway, until
from tests.models import BUNDLED_MODEL


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, pb.Adapter]:
    actual, model = {}, describe(BUNDLED_MODEL)
    for seed, name in enumerate("ab"):
        folder = tmp_path_factory.mktemp(name)
        write_adapter(BUNDLED_MODEL, folder, {"q_proj": 4}, seed=seed)
        actual[name] = pb.Adapter(digest=read_adapter(folder, model, 64).digest, source=str(folder), name=name)
    return actual


@asynccontextmanager
async def a_worker(redis_url: str, adapters: dict[str, pb.Adapter]) -> AsyncIterator[tuple[RunningWorker, FakeGateway]]:
    """A worker with one slot, whose ranks do not answer an order to load yet."""
    named = {name: adapter.source for name, adapter in adapters.items()}
    async with (
        running_worker(redis_url, adapters=named, adapter_slots=1) as worker,
        FakeGateway(worker.address) as gateway,
    ):
        worker.group.may_load.clear()
        await gateway.wait_serving()
        yield worker, gateway


async def test_ranks_that_are_lost_during_a_load_hand_its_requests_off(
    redis_url: str, adapters: dict[str, pb.Adapter]
) -> None:
    async with a_worker(redis_url, adapters) as (worker, gateway):
        waiting = await gateway.submit([1, 2], adapter=adapters["a"])
        await until(lambda: worker.group.orders)
        worker.group.die()
        await asyncio.wait_for(waiting.end.wait(), 60)
        assert waiting.last.handoff.reason == pb.Handoff.REASON_RANKS_LOST
        await gateway.wait_serving()
        worker.group.may_load.set()
        assert len((await gateway.complete([1, 2], adapter=adapters["a"])).ids) == 5
        assert [Path(order.folder) for order in worker.group.orders] == [Path(adapters["a"].source)] * 2


async def test_request_cancelled_during_its_adapter_load_frees_the_slot(
    redis_url: str, adapters: dict[str, pb.Adapter]
) -> None:
    async with a_worker(redis_url, adapters) as (worker, gateway):
        given_up = await gateway.submit([1, 2], adapter=adapters["a"])
        await until(lambda: worker.group.orders)
        await gateway.cancel(given_up)
        await gateway.wait_state(lambda state: state.waiting == 0)
        worker.group.may_load.set()
        assert len((await gateway.complete([1, 2], adapter=adapters["b"])).ids) == 5
        assert not given_up.outputs


async def test_a_pull_begins_once_the_adapter_is_there(redis_url: str, adapters: dict[str, pb.Adapter]) -> None:
    """Nothing listens at its source, so the prompt is computed."""
    async with a_worker(redis_url, adapters) as (worker, gateway):
        worker.group.may_load.set()
        hint = pb.PullHint(worker_id="w", incarnation="i", address=f"127.0.0.1:{free_port()}", tokens=32)
        answer = await gateway.complete(list(range(40)), adapter=adapters["a"], pull=hint)
        assert len(answer.ids) == 5
        assert answer.outputs[0].cached_tokens == 0


async def test_an_adapter_cannot_have_the_models_name(redis_url: str, adapters: dict[str, pb.Adapter]) -> None:
    with pytest.raises(StartupError, match="RYZANSTEIN_ADAPTERS ryzanstein-tiny: the model itself has this name"):
        async with running_worker(redis_url, adapters={"ryzanstein-tiny": adapters["a"].source}) as worker:
            await until(worker.task.done)
