"""The queue under batches and fine-tuning jobs, over a real Redis."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TypeVar, cast

import pytest
import pytest_asyncio
from redis.asyncio import Redis

from services.common.fine_tuning.records import JobError, Status
from services.common.fine_tuning.store import TuningClaim, TuningStore, new_event
from services.common.jobs.claim import Claim, LostClaimError, run_while_held
from services.common.jobs.queue import END, JobQueue
from services.common.keys import JobKeys, RedisKeys
from services.common.redis_client import RedisAccess, open_redis
from services.gateway.batches.files import FileStore, StorageLimits
from services.gateway.batches.objects import Plan
from services.gateway.batches.scripts import CHOICE
from services.gateway.batches.store import BatchStore, Outcome
from services.gateway.tenants.redis_guard import RedisGuard
from tests.integration.common.test_redis_users import ORDER
from tests.integration.gateway.redis_server import running_redis

T = TypeVar("T")
KEYS = RedisKeys("n")
LIFE_S = 3600
PLAN = Plan(
    endpoint="/v1/completions", input_file_id="file-in", completion_window="24h", created_at=0, expires_at=1 << 40,
    metadata=None, credential="", output_file_id="file-out", error_file_id="file-err",
)  # fmt: skip


async def once(operation: Callable[[], Awaitable[T]]) -> T:
    return await operation()


@pytest_asyncio.fixture
async def client(tmp_path: Path) -> AsyncIterator[Redis]:
    with running_redis(tmp_path) as server:
        async with open_redis(RedisAccess(f"unix://{server.socket}"), 5.0) as opened:
            yield opened


@pytest.fixture
def tuning(client: Redis) -> TuningStore:
    return TuningStore(client, KEYS, once, LIFE_S)


def batches(client: Redis) -> BatchStore:
    guard = cast("RedisGuard", SimpleNamespace(client=client, run=once))
    limits = StorageLimits(total=1000, tenant=1000, file=1000, life_s=LIFE_S)
    return BatchStore(FileStore(guard, KEYS, limits))


async def training(store: TuningStore) -> TuningClaim:
    """A job of the stage `train`, claimed."""
    assert await store.create(ORDER)
    checking = await store.claim("gateway", 10.0, ["check"])
    assert checking is not None
    await store.report(checking, 0, fields={"status": "queued", "stage": "train"})
    claim = await store.claim("tuner", 10.0, ["train"])
    assert claim is not None
    return claim


async def content(client: Redis) -> dict[str, set[str]]:
    """Each key, and the fields or members of those that have some."""
    readers = {b"hash": client.hkeys, b"zset": lambda key: client.zrange(key, 0, -1)}
    keys = {key: await client.type(key) for key in await client.keys("*")}
    return {
        key.decode(): {entry.decode() for entry in await readers[kind](key)} if kind in readers else set()
        for key, kind in keys.items()
    }


async def test_fine_tuning_keys_and_fields_are_those_of_the_revision_before(client: Redis, tuning: TuningStore) -> None:
    """Both revisions work on one queue during a rolling upgrade."""
    claim = await training(tuning)
    await tuning.report(claim, 10.0, [new_event("begun")], fields={"step": 1})
    fields = {"order", "status", "stage", "started_at", "step"}
    open_job = {
        "rz:n:tuning-jobs:t": {"ftjob-1"}, "rz:n:tuning-job:t:ftjob-1": fields,
        "rz:n:tuning-queue": {"t:ftjob-1"}, "rz:n:tuning-owners": {"t:ftjob-1"},
        "rz:n:tuning-events:t:ftjob-1": set[str](),
    }  # fmt: skip
    assert await content(client) == open_job
    assert await client.hget("rz:n:tuning-owners", "t:ftjob-1") == b"tuner"
    assert await tuning.turn("t", "ftjob-1", "cancelled", ("running",))
    ended = open_job | {"rz:n:tuning-job:t:ftjob-1": fields | {"finished_at"}}
    assert await content(client) == {key: value for key, value in ended.items() if value != {"t:ftjob-1"}}
    for key in ("rz:n:tuning-job:t:ftjob-1", "rz:n:tuning-events:t:ftjob-1"):
        assert 0 < await client.ttl(key) <= LIFE_S


async def test_batch_keys_and_fields_are_those_of_the_revision_before(client: Redis) -> None:
    """Both revisions work on one queue during a rolling upgrade."""
    store = batches(client)
    batch = await store.create("t", PLAN)
    claim = await store.claim("gateway/0", room=True)
    assert claim == Claim(f"t:{batch.id}", "gateway/0")
    assert await store.advance(claim, "validating", "in_progress", total=1) == "in_progress"
    assert await store.record(claim, PLAN, [Outcome(1, "completed", b"{}\n")]) == "in_progress"
    fields = {
        "plan", "status", "expires_at", "in_progress_at", "total", "completed", "input_tokens", "cached_tokens",
        "output_tokens",
    }  # fmt: skip
    files = {
        "rz:n:file-sizes": {"t:file-out"}, "rz:n:file-ends": {"t:file-out"}, "rz:n:file:t:file-out": set[str](),
        "rz:n:file-usage": {"total", "tenant:t"},
    }  # fmt: skip
    assert await content(client) == files | {
        "rz:n:batches:t": {batch.id}, f"rz:n:batch:t:{batch.id}": fields, "rz:n:batch-queue": {f"t:{batch.id}"},
        "rz:n:batch-owners": {f"t:{batch.id}"}, f"rz:n:batch-done:t:{batch.id}": set(),
    }  # fmt: skip
    await store.finish(claim, PLAN, "completed")
    assert await content(client) == files | {
        "rz:n:batches:t": {batch.id}, f"rz:n:batch:t:{batch.id}": fields | {"completed_at"},
        "rz:n:files:t": {"file-out"},
    }  # fmt: skip
    with pytest.raises(LostClaimError):
        await store.record(claim, PLAN, [Outcome(2, "completed", b"{}\n")])


async def test_claim_is_lost_once_another_owner_has_the_job(tuning: TuningStore) -> None:
    first = await training(tuning)
    await tuning.report(first, 0)
    second = await tuning.claim("other", 10.0, ["train"])
    assert second is not None
    for writing in (
        tuning.report(first, 10.0, [new_event("late")]),
        tuning.end(first, "failed", [new_event("late")], {}),
    ):
        with pytest.raises(LostClaimError):
            await writing
    assert await tuning.events("t", "ftjob-1") == []
    assert await tuning.report(second, 10.0) == "running"


@pytest.mark.parametrize(
    ("ends", "status"), [pytest.param(True, "failed", id="ends"), pytest.param(False, "queued", id="given_back")]
)
async def test_report_is_written_after_a_pause_that_its_owner_has_not_seen(
    tuning: TuningStore, *, ends: bool, status: Status
) -> None:
    claim = await training(tuning)
    assert await tuning.turn("t", "ftjob-1", "paused", ("running",))
    assert await tuning.turn("t", "ftjob-1", "queued", ("paused",))
    error = JobError(code="c", message="m")
    if ends:
        await tuning.end(claim, "failed", [], {"error": error.model_dump_json()})
    else:
        await tuning.report(claim, 0, fields={"stage": "publish", "error": error.model_dump_json()})
    job = await tuning.get("t", "ftjob-1")
    assert job is not None
    assert (job.status, job.error) == (status, error)
    assert (await tuning.claim("other", 10.0, ["publish"]) is None) is ends


async def test_tenant_with_the_fewest_running_batches_is_claimed_first(client: Redis) -> None:
    store = batches(client)
    for tenant in ("a", "a", "a", "b"):
        await store.create(tenant, PLAN)
    claims = [await store.claim(f"gateway/{number}", room=True) for number in range(4)]
    assert [claim and claim.tenant for claim in claims] == ["a", "b", "a", "a"]
    assert await store.claim("gateway/4", room=True) is None


async def test_only_a_batch_that_has_to_end_is_claimed_without_room(client: Redis) -> None:
    store = batches(client)
    made = [await store.create("t", PLAN) for _ in range(2)]
    assert await store.claim("gateway/0", room=False) is None
    assert (await store.cancel("t", made[1].id)).status == "cancelling"
    claim = await store.claim("gateway/1", room=False)
    assert claim is not None
    assert claim.job_id == made[1].id
    assert await store.renew(claim) == "cancelling"


async def test_queue_forgets_a_job_that_is_gone(client: Redis) -> None:
    keys = JobKeys("index:", "job:", "queue", "owners")
    queue = JobQueue(client, keys, once, LIFE_S, CHOICE)
    fields: dict[str, str | int | bytes] = {"status": "validating", "expires_at": 1 << 40}
    assert await queue.create("t:1", fields, most_open=1)
    assert not await queue.create("t:2", fields, most_open=1)
    claim = await queue.claim("owner", 10.0, 1)
    assert claim is not None
    await client.delete("job:t:1")
    with pytest.raises(LostClaimError):
        await queue.write(claim, {"validating": "completed"}, {}, END)
    assert not await queue.turn("t:1", {"validating": "cancelled"}, {})
    await client.zadd("queue", {"t:1": 0})
    assert await queue.claim("other", 10.0, 1) is None
    assert (await client.exists("queue", "owners", "job:t:1")) == 0


async def test_work_ends_with_its_claim_and_its_error_is_raised() -> None:
    began, ended = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async def renew() -> None:
        await began.wait()
        raise LostClaimError

    async with asyncio.timeout(60):
        with pytest.raises(LostClaimError):
            await run_while_held(work(), renew, 0.0)
    assert ended.is_set()

    async def fail() -> None:
        raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug"):
        await run_while_held(fail(), renew, 3600.0)
