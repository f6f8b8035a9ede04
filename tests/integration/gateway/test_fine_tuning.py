"""Fine-tuning jobs over a real Redis, with OpenAI's client: what is refused, and what all gateways see alike."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.fine_tuning import FineTuningJob

from services.common.fine_tuning.records import Presence
from services.common.fine_tuning.store import Claim, JobStore, LostClaimError, new_event
from services.common.keys import RedisKeys
from services.common.redis_client import RedisAccess, open_redis
from services.finetuner.main import patiently
from tests.integration.gateway.gateways import Stack
from tests.integration.gateway.redis_server import RedisServer, running_redis
from tests.integration.gateway.test_batches import gateway

MODEL = "tiny"
LINE = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with running_redis(tmp_path) as running:
        yield running


def finetuner(server: RedisServer) -> JobStore:
    """What a fine-tuner sees."""
    return JobStore(open_redis(RedisAccess(server.url), 5.0), RedisKeys("default"), patiently, 3600)


async def file(stack: Stack, *lines: Any, purpose: Any = "fine-tune") -> str:
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    return (await stack.client.files.create(file=("a.jsonl", text.encode()), purpose=purpose)).id


async def until(stack: Stack, job_id: str, *statuses: str) -> FineTuningJob:
    async with asyncio.timeout(30):
        while (job := await stack.client.fine_tuning.jobs.retrieve(job_id)).status not in statuses:  # noqa: ASYNC110  # it happens in the gateway
            await asyncio.sleep(0.02)
    return job


async def claimed(store: JobStore) -> Claim:
    claim = await store.claim("tuner", 10.0, ["train"])
    assert claim is not None
    return claim


async def test_what_is_wrong_with_a_job_is_named(server: RedisServer) -> None:
    async with gateway(server) as stack:
        good, store = await file(stack, *[LINE] * 10), finetuner(server)
        jobs = stack.client.fine_tuning.jobs
        with pytest.raises(openai.InternalServerError, match=r"pip install 'ryzanstein\[finetune\]'"):
            await jobs.create(model=MODEL, training_file=good)
        await store.appear("tuner", Presence(models=[MODEL], quantizations=["none"]))
        other = await file(stack, LINE, purpose="batch")
        nf4 = {"type": "supervised", "supervised": {"hyperparameters": {"quantization": "nf4"}}}
        refused: list[tuple[dict[str, Any], str]] = [
            ({"model": "other"}, "model"),
            ({"training_file": "file-x"}, "training_file"),
            ({"validation_file": other}, "validation_file"),
            ({"suffix": "a:b"}, "suffix"),
            ({"method": {"type": "dpo"}}, "method.type"),
            ({"method": nf4}, "method.supervised.hyperparameters.quantization"),
            ({"hyperparameters": {"n_epochs": 0}}, "hyperparameters.n_epochs"),
            ({"integrations": [{"type": "wandb"}]}, "integrations"),
        ]
        for wrong, param in refused:
            with pytest.raises(openai.BadRequestError) as failure:
                await jobs.create(**({"model": MODEL, "training_file": good} | wrong))
            assert failure.value.param == param
            assert param.rpartition(".")[2] in str(failure.value)
        for call in (jobs.retrieve, jobs.cancel, jobs.pause, jobs.resume, jobs.list_events, jobs.checkpoints.list):
            with pytest.raises(openai.NotFoundError):
                await call("ftjob-none")
        job = await jobs.create(model=MODEL, training_file=await file(stack, *[LINE] * 9, "{"))
        failed = await until(stack, job.id, "failed")
        assert failed.error is not None
        assert (failed.error.code, failed.error.param) == ("invalid_training_file", "training_file")
        assert "line 10: not valid JSON" in str(failed.error.message)
        with pytest.raises(openai.BadRequestError, match="status `failed` cannot be cancelled"):
            await jobs.cancel(job.id)


async def test_all_gateways_see_a_job_and_its_owner_hears_what_users_ask_for(server: RedisServer) -> None:
    async with gateway(server) as stack, gateway(server) as beside:
        store = finetuner(server)
        await store.appear("tuner", Presence(models=[MODEL], quantizations=["none"]))
        training = await file(stack, *[LINE] * 10)
        made = [await stack.client.fine_tuning.jobs.create(model=MODEL, training_file=training) for _ in range(2)]
        for job in made:
            await until(beside, job.id, "queued")
        jobs = beside.client.fine_tuning.jobs
        assert [job.id async for job in jobs.list(limit=1)] == [job.id for job in reversed(made)]

        claim = await claimed(store)
        first = made[0].id
        assert claim.member.endswith(first), "the one that waited longest"
        assert (
            await store.report(claim, 10.0, [new_event(f"event {n}") for n in range(5)], fields={"step": 1})
            == "running"
        )
        messages = [event.message async for event in jobs.list_events(first, limit=2)]
        assert messages[:5] == [f"event {n}" for n in (4, 3, 2, 1, 0)]
        assert (await jobs.pause(first)).status == "paused"
        assert await store.report(claim, 0, fields={"step": 2}) == "paused"
        assert (await jobs.retrieve(first)).status == "paused"
        assert (await claimed(store)).member.endswith(made[1].id), "a paused job has no turn"
        assert (await jobs.resume(first)).status == "queued"
        again = await claimed(store)
        assert again.member.endswith(first)
        assert (await jobs.cancel(first)).status == "cancelled"
        with pytest.raises(LostClaimError):
            await store.report(again, 10.0)
        assert (await jobs.retrieve(first)).status == "cancelled"
