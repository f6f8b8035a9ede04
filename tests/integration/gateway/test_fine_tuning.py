"""Fine-tuning jobs over a real Redis, with OpenAI's client: what is refused, and what all gateways see alike."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.fine_tuning import FineTuningJob

from services.common.adapters import RegisteredAdapter
from services.common.extras import pip_install
from services.common.fine_tuning.records import Order, Presence, Result
from services.common.fine_tuning.store import Job, TuningClaim, TuningStore, new_event
from services.common.jobs.claim import Claim, LostClaimError
from services.common.keys import RedisKeys
from services.common.lifeline import PARENT_VARIABLE
from services.common.redis_client import RedisAccess, open_redis
from services.finetuner.folders import sweep
from services.finetuner.main import patiently
from services.gateway.fine_tuning.publishing import Publisher
from services.gateway.tenants.keys import digest_of
from services.gateway.tenants.redis_guard import RedisAwayError
from services.gateway.usage import NANOS
from tests.integration.gateway.gateways import GatewayStack
from tests.integration.gateway.redis_server import RedisServer
from tests.integration.gateway.test_batches import gateway
from tests.integration.gateway.usage import COSTS, TENANCY, read, results

MODEL = "tiny"
LINE = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
ORDER = Order(
    id="", tenant="", model=MODEL, training_file="file-a", validation_file=None, suffix=None, seed=1, n_epochs=1,
    batch_size=1, learning_rate_multiplier=1.0, lora_rank=8, quantization="none", metadata=None, credential="",
    created_at=1,
)  # fmt: skip


def finetuner(server: RedisServer) -> TuningStore:
    """The fine-tuner's view of jobs."""
    return TuningStore(open_redis(RedisAccess(server.url), 5.0), RedisKeys("default"), patiently, 3600)


async def file(stack: GatewayStack, *lines: Any, purpose: Any = "fine-tune") -> str:
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    return (await stack.client.files.create(file=("a.jsonl", text.encode()), purpose=purpose)).id


async def until(stack: GatewayStack, job_id: str, *statuses: str) -> FineTuningJob:
    async with asyncio.timeout(60):
        while (job := await stack.client.fine_tuning.jobs.retrieve(job_id)).status not in statuses:  # noqa: ASYNC110  # it happens in the gateway
            await asyncio.sleep(0.02)
    return job


async def claimed(store: TuningStore) -> TuningClaim:
    claim = await store.claim("tuner", 10.0, ["train"])
    assert claim is not None
    return claim


async def test_invalid_job_is_rejected_by_field(server: RedisServer) -> None:
    async with gateway(server) as stack:
        good, store = await file(stack, *[LINE] * 10), finetuner(server)
        jobs = stack.client.fine_tuning.jobs
        with pytest.raises(openai.InternalServerError, match=re.escape(pip_install("finetune"))):
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
            ({"method": nf4, "hyperparameters": {"n_epochs": 1}}, "hyperparameters"),
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


async def test_fine_tuning_job_is_seen_by_all_gateways_and_its_owner_gets_user_commands(server: RedisServer) -> None:
    async with gateway(server) as stack, gateway(server) as second:
        store = finetuner(server)
        await store.appear("tuner", Presence(models=[MODEL], quantizations=["none"]))
        training = await file(stack, *[LINE] * 10)
        made = [await stack.client.fine_tuning.jobs.create(model=MODEL, training_file=training) for _ in range(2)]
        for job in made:
            await until(second, job.id, "queued")
        jobs = second.client.fine_tuning.jobs
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


async def test_open_jobs_of_a_tenant_are_limited_and_expired_jobs_are_not_listed(server: RedisServer) -> None:
    keys = RedisKeys("default")
    async with gateway(server) as stack:
        store, training = finetuner(server), await file(stack, *[LINE] * 10)
        await store.appear("tuner", Presence(models=[MODEL], quantizations=["none"]))
        made = [ORDER.model_copy(update={"id": f"ftjob-{n:02}", "training_file": training}) for n in range(20)]
        for order in made:
            assert await store.create(order)
        jobs = stack.client.fine_tuning.jobs
        with pytest.raises(openai.RateLimitError, match="You have too many open fine-tuning jobs"):
            await jobs.create(model=MODEL, training_file=training)
        server.client.delete(keys.tuning_jobs.job(keys.member("", made[18].id)))
        page = await jobs.list(limit=2)
        assert ([job.id for job in page.data], page.has_more) == ([made[19].id, made[17].id], True)


METADATA: list[dict[str, str] | None] = [{"run": "1", "by": "ann lee"}, {"run": "2", "by": "ann lee"}, {}, None]
FILTERS = {
    "": [3, 2, 1, 0],
    "metadata[run]=1": [0],
    "metadata[by]=ann%20lee": [1, 0],
    "metadata%5Bby%5D=ann+lee&metadata%5Brun%5D=2": [1],
    "metadata[run]=": [],
    "metadata[run]=3": [],
    "metadata=null": [3, 2],
    "metadata=": [3, 2],
    "metadata[by]=ann lee&limit=1": [1],
}


async def test_jobs_are_listed_by_their_metadata(server: RedisServer) -> None:
    for number, metadata in enumerate(METADATA):
        await finetuner(server).create(ORDER.model_copy(update={"id": f"ftjob-{number}", "metadata": metadata}))
    async with gateway(server) as stack:
        for query, expected in FILTERS.items():
            page = (await stack.http.get(f"/v1/fine_tuning/jobs?{query}")).json()
            assert [job["id"] for job in page["data"]] == [f"ftjob-{n}" for n in expected], query
            assert page["has_more"] is ("limit" in query)
        named = stack.client.fine_tuning.jobs.list(limit=1, metadata={"by": "ann lee"})
        assert [job.id async for job in named] == ["ftjob-1", "ftjob-0"]
        for query in ("metadata=x", "metadata[]=x", "metadata[a=x", "metadata[a]b=x"):
            answer = await stack.http.get(f"/v1/fine_tuning/jobs?{query}")
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "metadata"), query


async def test_a_file_that_is_deleted_before_its_check_fails_the_job(server: RedisServer) -> None:
    async with gateway(server) as stack:
        await finetuner(server).create(ORDER.model_copy(update={"id": "ftjob-1"}))
        failed = await until(stack, "ftjob-1", "failed")
        assert failed.error is not None
        assert failed.error.message == "The job failed due to an invalid training file file-a: it was deleted."


async def test_only_administrators_train(server: RedisServer) -> None:
    keys = json.dumps([{"key_sha256": digest_of("k"), "name": "k"}])
    async with gateway(server, tenancy=True, api_keys=keys) as stack:
        with pytest.raises(openai.PermissionDeniedError, match="the result is served to all keys"):
            await stack.client.with_options(api_key="k").fine_tuning.jobs.create(model=MODEL, training_file="file-a")


async def test_job_fails_after_three_unexpected_errors(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a gateway that serves the result; the fine-tuner counts its own in the same way."""
    served = []

    async def serve(self: Publisher, job: Job, result: Result) -> None:
        served.append(job.order.id)
        raise RuntimeError("a bug")

    monkeypatch.setattr(Publisher, "serve", serve)
    monkeypatch.setattr("services.gateway.fine_tuning.runner._LEASE_S", 0.1)
    async with gateway(server) as stack:
        store = finetuner(server)
        await store.appear("tuner", Presence(models=[MODEL], quantizations=["none"]))
        training = await file(stack, *[LINE] * 10)
        job = await stack.client.fine_tuning.jobs.create(model=MODEL, training_file=training)
        await until(stack, job.id, "queued")
        result = Result(folder="/adapter", train_loss=1.0, valid_loss=None, examples=[]).model_dump_json()
        await store.report(await claimed(store), 0, fields={"stage": "publish", "result": result})
        failed = await until(stack, job.id, "failed")
        assert failed.error is not None
        assert failed.error.code == "internal_error"
        assert failed.error.message == "Internal error in the stage `publish`: RuntimeError: a bug (3 times)"
        assert served == [job.id] * 3


async def test_a_job_that_is_served_costs_its_trained_tokens_once(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when its gateway is lost between the count and the job's end."""
    ends, lost = TuningStore.end, list[str]()

    async def serve(self: Publisher, job: Job, result: Result) -> None:
        return None

    async def end(self: TuningStore, claim: Claim, *rest: Any) -> None:
        if not lost:
            lost.append(claim.member)
            raise RedisAwayError
        await ends(self, claim, *rest)

    monkeypatch.setattr(Publisher, "serve", serve)
    monkeypatch.setattr(TuningStore, "end", end)
    monkeypatch.setattr("services.gateway.fine_tuning.runner._LEASE_S", 0.1)
    prices = json.dumps({MODEL: {"training": 3.0, "output": 8.0}})
    async with gateway(server, prices=prices, **TENANCY) as stack:
        root = replace(stack, client=stack.client.with_options(api_key="root"))
        store, training = finetuner(server), await file(root, *[LINE] * 10)
        await store.appear("tuner", Presence(models=[MODEL], quantizations=["none"]))
        job = await root.client.fine_tuning.jobs.create(model=MODEL, training_file=training)
        await until(root, job.id, "queued")
        result = Result(folder="/adapter", train_loss=1.0, valid_loss=None, examples=[]).model_dump_json()
        fields = {"stage": "publish", "result": result, "trained_tokens": 1_000_000}
        await store.report(await claimed(store), 0, fields=fields)
        assert (await until(root, job.id, "succeeded")).trained_tokens == 1_000_000
        assert len(lost) == 1
        (item,) = results(await read(root.http, COSTS, group_by=["line_item", "project_id"]))
        assert (item["line_item"], item["project_id"]) == (f"{MODEL}, training_tokens", "root")
        assert (item["quantity"], item["amount"]["value"]) == (1_000_000, 3.0)
        assert server.sum_of(RedisKeys("default").spent("root", "*")) == 3 * NANOS
        counted = root.gateway.metrics.registry.get_sample_value(
            "ryzanstein_gateway_cost_total", {"model": MODEL, "tenant": "root"}
        )
        assert counted == 3.0


async def test_job_leftovers_are_removed_except_served_adapters(server: RedisServer, tmp_path: Path) -> None:
    jobs = tmp_path / "jobs"
    store, client = finetuner(server), open_redis(RedisAccess(server.url), 5.0)
    for name in ("running", "failed", "forgotten", "served", "recent"):
        named = ORDER.model_copy(update={"id": f"ftjob-{name}"})
        folder = jobs / named.id
        (folder / "adapter").mkdir(parents=True)
        (folder / "job.json").write_text(named.model_dump_json())
        (folder / "training.jsonl").write_text("{}")
        if name in ("running", "failed"):
            await store.create(named)
            claim = await store.claim("tuner", 10.0, ["check"])
            assert claim is not None
            if name == "failed":
                await store.end(claim, "failed", [], {})
        if name != "recent":
            for path in folder.iterdir():
                os.utime(path, (1, 1))
    (jobs / "ftjob-broken").mkdir()
    (jobs / "ftjob-broken" / "job.json").write_text("{")
    source = str(jobs / "ftjob-served" / "adapter")
    adapter = RegisteredAdapter("ft", MODEL, "digest", source)
    await client.hset(RedisKeys("default").adapters, adapter.name, adapter.to_json())
    await sweep(jobs, store, 3600.0)
    assert {path.name: {below.name for below in path.iterdir()} for path in jobs.iterdir()} == {
        "ftjob-running": {"job.json", "training.jsonl", "adapter"},
        "ftjob-served": {"job.json", "adapter"},
        "ftjob-recent": {"job.json", "adapter"},
        "ftjob-broken": {"job.json"},
    }
    await client.aclose()


def test_training_does_not_begin_when_its_fine_tuner_has_died(tmp_path: Path) -> None:
    """The kernel ends it later on; what it can't see is a death before training has asked for that."""
    command = [sys.executable, "-m", "services.finetuner.training", str(tmp_path), "base", "1", "16", "1", "0"]
    environment = {**os.environ, PARENT_VARIABLE: "1"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 1
    assert "the parent died before this process was ready" in ended.stderr
