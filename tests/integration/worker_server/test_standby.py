"""A standby computes no block of a lost worker's text that it has a copy of.

The ranks are those of the scheduler's tests, which notice KV of another prefix; the last test has real ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from ryzanstein.v1 import worker_pb2 as pb

from services.common.ports import free_port
from services.worker.kv_transfer import copy_behind
from tests.integration.worker_server.conftest import RunningWorker
from tests.integration.worker_server.gateway import FakeGateway, GatewayAnswer, until
from tests.integration.worker_server.processes import ServerProcess, server_process
from tests.integration.worker_server.test_kv_sync import Subscriber
from tests.integration.worker_server.test_pull_failures import a_worker, cached, metric
from tests.unit.worker.scheduling.fake_ranks import generate

PROMPT = [i % 90 + 1 for i in range(600)]
SETTINGS = {
    "kv_tokens": 4096,
    "max_model_len": 2000,
    "max_batched_tokens": 32,  # a prompt's blocks are published while others are copied
    "standby_tokens": 256,
    "standby_mb_per_s": 1000.0,
}
BLOCK = 16
MANY = 300  # generated tokens


Pair = tuple[RunningWorker, FakeGateway, RunningWorker, FakeGateway]


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_behind, "PERIOD_S", 0.02)
    monkeypatch.setattr(copy_behind, "RETRY_S", 0.05)
    monkeypatch.setattr(copy_behind, "LAG_TOKENS", 16)


@asynccontextmanager
async def pair(
    redis_url: str, **standby: object
) -> AsyncIterator[tuple[RunningWorker, FakeGateway, RunningWorker, FakeGateway]]:
    """A worker whose requests are slow, and its standby."""
    async with AsyncExitStack() as stack:
        owner, from_owner = await stack.enter_async_context(a_worker(redis_url, **SETTINGS))
        other, from_other = await stack.enter_async_context(a_worker(redis_url, **{**SETTINGS, **standby}))
        yield owner, from_owner, other, from_other


def standby_of(worker: RunningWorker) -> pb.Standby:
    return pb.Standby(worker_id="standby", address=worker.address)


async def copied(worker: RunningWorker, n_blocks: int) -> None:
    """Wait until a standby has taken that many blocks."""
    async with asyncio.timeout(60):
        while await metric(worker, "copied_blocks") < n_blocks:  # noqa: ASYNC110
            await asyncio.sleep(0.2)


async def until_counted(worker: RunningWorker, reason: str, times: int = 1) -> None:
    """Wait until copies to standbys have failed for this reason."""
    async with asyncio.timeout(60):
        while await metric(worker, "copy_failures", reason=reason) < times:  # noqa: ASYNC110
            await asyncio.sleep(0.2)


async def resume(
    gateway: FakeGateway, answer: GatewayAnswer, prompt: list[int] = PROMPT, **fields: object
) -> GatewayAnswer:
    """The rest of an interrupted answer of `MANY` tokens."""
    return await gateway.complete(prompt, MANY, generated_ids=answer.ids, attempt=2, **fields)


async def test_standby_continues_a_text_from_copies(redis_url: str) -> None:
    async with pair(redis_url) as (owner, from_owner, other, from_other):
        owner.group.step_s = 0.05
        answer = await from_owner.submit(PROMPT, MANY, standby=standby_of(other))
        await copied(other, (len(PROMPT) + 3 * BLOCK) // BLOCK)  # generated tokens follow those of the prompt
        assert await metric(owner, "copy_failures", reason="mismatch") == 0
        owner.group.die()
        await answer.end.wait()
        steps = other.group.n_steps
        rest = await resume(from_other, answer)
        assert answer.ids + rest.ids == generate(PROMPT, MANY, pb.Sampling())
        assert cached(rest) == len(PROMPT)
        assert other.group.n_steps - steps <= MANY - len(answer.ids) + 8, "no steps of a prefill"
        assert await metric(other, "resumed_tokens") == len(PROMPT)
        assert await metric(other, "resumed_cached_tokens") == len(PROMPT)


async def test_copies_begin_at_the_shortest_length_of_the_settings(redis_url: str) -> None:
    async with pair(redis_url) as (owner, from_owner, other, _):
        owner.group.step_s = 0.02
        answer = await from_owner.submit(PROMPT[:200], MANY, standby=standby_of(other))
        await answer.at_least(20)
        assert await metric(other, "copied_blocks") == 0
        await copied(other, 256 // BLOCK)


async def test_drained_worker_hands_over_the_last_blocks(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copies of a worker that looks for complete blocks once an hour are those of its drain."""
    async with pair(redis_url) as (owner, from_owner, other, from_other):
        owner.group.step_s = 0.02
        answer = await from_owner.submit(PROMPT, MANY, standby=standby_of(other))
        await copied(other, len(PROMPT) // BLOCK)
        monkeypatch.setattr(copy_behind, "LAG_TOKENS", 1_000_000)
        before, known = await metric(other, "copied_blocks"), len(PROMPT) + len(answer.ids)
        await answer.at_least(len(answer.ids) + 2 * BLOCK)
        await from_owner.stub.Drain(pb.DrainRequest())
        await answer.end.wait()
        assert answer.last.handoff.reason == pb.Handoff.REASON_DRAIN
        assert await metric(other, "copied_blocks") > before
        assert await metric(other, "copied_blocks") >= (known + BLOCK) // BLOCK
        rest = await resume(from_other, answer)
        assert answer.ids + rest.ids == generate(PROMPT, MANY, pb.Sampling())
        assert cached(rest) == len(PROMPT)


async def test_other_salts_do_not_find_copies(redis_url: str) -> None:
    async with pair(redis_url) as (owner, from_owner, other, from_other):
        owner.group.step_s = 0.02
        await from_owner.submit(PROMPT, MANY, standby=standby_of(other), cache_salt="one")
        await copied(other, len(PROMPT) // BLOCK)
        assert cached(await from_other.complete(PROMPT, cache_salt="two")) == 0
        assert cached(await from_other.complete(PROMPT)) == 0
        assert cached(await from_other.complete(PROMPT, cache_salt="one")) == 592


async def test_copies_leave_half_of_a_standby_s_pool(redis_url: str) -> None:
    """They are evicted for its own requests, and the owner sends the rest when there is room again."""
    async with pair(redis_url, kv_tokens=1024, max_model_len=1000) as (owner, from_owner, other, from_other):
        owner.group.step_s = 0.02
        answer = await from_owner.submit(PROMPT, MANY, standby=standby_of(other))
        await copied(other, 32)
        await until_counted(owner, "full")
        assert await metric(other, "copied_blocks") == 32
        own = [5] * 900
        assert (await from_other.complete(own)).ids == generate(own, 5, pb.Sampling())
        await from_owner.cancel(answer)
        await from_other.wait_state(lambda state: state.kv_blocks_used == 0)  # its blocks are evictable
        again = [7, *PROMPT[1:]]
        await from_owner.submit(again, MANY, standby=standby_of(other))
        await copied(other, 64)


async def test_lost_or_foreign_standby_disturbs_no_text(redis_url: str) -> None:
    """The one of another layout is not tried again; the lost one is, and gets copies once it has restarted."""
    async with pair(redis_url, dtype="float32") as (owner, from_owner, foreign, _):
        owner.group.step_s = 0.05
        port = free_port()
        gone = pb.Standby(worker_id="gone", address=f"127.0.0.1:{port}", spares=[standby_of(foreign)])
        answer = await from_owner.submit(PROMPT, MANY, standby=gone)
        await until_counted(owner, "mismatch")
        await until_counted(owner, "unreachable", 3)
        async with a_worker(redis_url, **SETTINGS, worker_port=port) as (restarted, _):
            await copied(restarted, len(PROMPT) // BLOCK)
            owner.group.step_s = 0.001
            await answer.end.wait()
        assert answer.ids == generate(PROMPT, MANY, pb.Sampling())
        assert await metric(owner, "copy_failures", reason="mismatch") == 1
        assert await metric(foreign, "copied_blocks") == 0


async def test_text_outlives_its_standby_and_then_its_worker(tmp_path: Path, redis_url: str) -> None:
    """With real ranks: the standby is killed in mid-copy, then the owner; the next standby computes no prompt."""
    prompt = [2 + i % 4000 for i in range(300)]
    endless = pb.Sampling(max_tokens=1700, ignore_eos=True, logprobs=20)  # which make steps long
    settings = {"DTYPE": "bfloat16", "STANDBY_TOKENS": "256", "STANDBY_MB_PER_S": "1000"}
    async with AsyncExitStack() as stack:
        workers = [stack.enter_context(server_process(tmp_path, redis_url, **settings)) for _ in range(3)]
        owner, first, second = workers
        gateways = [await stack.enter_async_context(FakeGateway(worker.address)) for worker in workers]
        for gateway in gateways:
            await gateway.wait_serving()
        from_owner, from_first, survivor = gateways
        spare = pb.Standby(worker_id="second", address=second.address)
        standby = pb.Standby(worker_id="first", address=first.address, spares=[spare])
        answer = await from_owner.submit(prompt, sampling=endless, standby=standby)
        begun = Subscriber(from_first, pb.KvSyncRequest())
        await until(lambda: begun.held)
        await kill(first)
        subscriber = Subscriber(survivor, pb.KvSyncRequest())
        await until(lambda: len(subscriber.held) >= len(prompt) // BLOCK)
        await kill(owner)
        assert not answer.end.is_set()
        subscriber.stop()
        await survivor.wait_state(lambda state: state.kv_blocks_used == 0)  # the blocks are evictable
        sampling = pb.Sampling(max_tokens=len(answer.ids) + 50, ignore_eos=True)
        rest = await survivor.complete(prompt, sampling=sampling, generated_ids=answer.ids, attempt=2)
        assert cached(rest) >= len(prompt) // BLOCK * BLOCK
        whole = await survivor.complete(prompt, sampling=sampling, cache_salt="another")
        assert cached(whole) == 0
        assert answer.ids + rest.ids == whole.ids


async def kill(worker: ServerProcess) -> None:
    worker.process.kill()
    await asyncio.to_thread(worker.process.wait)


async def test_copies_keep_to_their_rate(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses are recorded instead of waited for: the bytes of a message take their time before the next one."""
    paused: list[float] = []

    async def pause(_: copy_behind.CopyBehind, seconds: float) -> None:
        paused.append(seconds)
        await asyncio.sleep(0.2)

    monkeypatch.setattr(copy_behind.CopyBehind, "_pause", pause)
    async with (
        a_worker(redis_url, **{**SETTINGS, "standby_mb_per_s": 1e-6}) as (owner, gateway),
        a_worker(redis_url, **SETTINGS) as (other, _),
    ):
        owner.group.step_s = 0.02
        await gateway.submit(PROMPT, MANY, standby=standby_of(other))
        await copied(other, len(PROMPT) // BLOCK)
        n_bytes = await metric(other, "copied_bytes")
        await until(lambda: sum(seconds for seconds in paused if seconds > 100) > n_bytes / 2)
