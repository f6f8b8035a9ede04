"""A worker says which requests move on without outputs: how far, not oftener than a heartbeat, and of no others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from ryzanstein.v1 import worker_pb2 as pb

from services.worker.kv_transfer import loader
from tests.integration.worker_server.conftest import RunningWorker, running_worker
from tests.integration.worker_server.gateway import FakeGateway, GatewayAnswer, until
from tests.integration.worker_server.test_adapters import adapters
from tests.integration.worker_server.test_pull_failures import PROMPT, a_source, good

__all__ = ["adapters"]  # a fixture

BEAT_MS = 100
STILL_S = 0.5  # several heartbeats


@asynccontextmanager
async def a_worker(redis_url: str, **settings: object) -> AsyncIterator[tuple[RunningWorker, FakeGateway]]:
    async with (
        running_worker(redis_url, max_batched_tokens=16, **settings) as worker,
        FakeGateway(worker.address, BEAT_MS) as gateway,
    ):
        await gateway.wait_serving()
        yield worker, gateway


def told(gateway: FakeGateway, answer: GatewayAnswer) -> list[int]:
    """The reported progress of a request: its computed tokens."""
    return [one.computed_tokens for one in gateway.progress if one.request_id == answer.request_id]


async def stands_still(gateway: FakeGateway, answer: GatewayAnswer) -> None:
    await asyncio.sleep(STILL_S)
    before = len(told(gateway, answer))
    await asyncio.sleep(STILL_S)
    assert len(told(gateway, answer)) == before


async def test_prefill_chunks_of_a_prompt_and_of_earlier_prompts_count_as_progress(redis_url: str) -> None:
    async with a_worker(redis_url, max_running=1) as (worker, gateway):
        worker.group.step_s = 2 * BEAT_MS / 1e3
        first, second = [await gateway.submit(list(range(start, start + 80)), 1) for start in (1, 2)]
        await first.end.wait()
        assert told(gateway, first) == sorted(told(gateway, first))
        assert {16, 32, 48} <= set(told(gateway, first)) <= {0, 16, 32, 48, 64, 80}
        waited = told(gateway, second)
        assert len(waited) >= 3
        assert set(waited) == {0}, "it waits, and moves with those before it"
        await second.end.wait()
        assert {16, 32, 48} <= set(told(gateway, second))


async def test_a_long_step_is_progress_while_the_ranks_show_signs_of_life(redis_url: str) -> None:
    async with a_worker(redis_url) as (worker, gateway):
        worker.group.step_s = 3600.0
        answer = await gateway.submit([1] * 20)
        await stands_still(gateway, answer)
        for _ in range(3):
            before = len(told(gateway, answer))
            worker.group.signs += 1
            await until(lambda before=before: len(told(gateway, answer)) == before + 1)
        await stands_still(gateway, answer)


async def test_requests_with_outputs_need_no_progress(redis_url: str) -> None:
    async with a_worker(redis_url) as (worker, gateway):
        worker.group.step_s = BEAT_MS / 1e3 / 4
        answer = await gateway.submit([1], 100)
        await answer.at_least(1)
        before = len(told(gateway, answer))
        await answer.end.wait()
        assert len(told(gateway, answer)) - before < 5, "a beat may fall between two tokens on a busy machine"


async def test_blocks_that_arrive_are_progress_and_a_silent_source_is_none(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "LEAST_S", 60.0)
    monkeypatch.setattr(loader, "MOST_S", 60.0)
    goes_on = asyncio.Semaphore(0)

    async def trickling(request: pb.PullBlocksRequest) -> AsyncIterator[pb.KvBlock]:
        for index in range(len(request.digests)):
            await goes_on.acquire()
            yield good(request, index)

    async with a_worker(redis_url) as (_, gateway), a_source(trickling) as hint:
        answer = await gateway.submit(PROMPT, pull=hint)
        await gateway.complete([5] * 40)  # the ranks work; for others
        await stands_still(gateway, answer)
        for _ in range(3):
            before = len(told(gateway, answer))
            goes_on.release()
            await until(lambda before=before: len(told(gateway, answer)) > before)
        await gateway.cancel(answer)
        await gateway.wait_state(lambda state: state.waiting == 0)


async def test_a_load_of_an_adapter_is_progress_while_the_ranks_read(
    redis_url: str, adapters: dict[str, pb.Adapter]
) -> None:
    named = {name: adapter.source for name, adapter in adapters.items()}
    async with a_worker(redis_url, adapters=named, adapter_slots=1) as (worker, gateway):
        worker.group.may_load.clear()
        answer = await gateway.submit([1, 2], adapter=adapters["a"])
        await until(lambda: worker.group.orders)
        await stands_still(gateway, answer)
        before = len(told(gateway, answer))
        worker.group.signs += 1
        await until(lambda: len(told(gateway, answer)) == before + 1)
        worker.group.may_load.set()
        await answer.end.wait()
        assert len(answer.ids) == 5


async def test_retry_reuses_the_prefilled_blocks_of_a_cancelled_prompt(redis_url: str) -> None:
    async with a_worker(redis_url) as (worker, gateway):
        worker.group.step_s = 2 * BEAT_MS / 1e3
        given_up = await gateway.submit(PROMPT)
        await until(lambda: any(computed >= 48 for computed in told(gateway, given_up)))
        await gateway.cancel(given_up)
        await gateway.wait_state(lambda state: state.running == 0)
        worker.group.step_s = 0.001
        again = await gateway.complete(PROMPT, attempt=2)
        assert again.outputs[0].cached_tokens >= 48
