"""Batches at the limits of storage, time and workers, and forms and lines that are none."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from services.common.keys import RedisKeys
from tests.integration.gateway.fleet import Worker
from tests.integration.gateway.gateways import eventually
from tests.integration.gateway.redis_server import RedisServer
from tests.integration.gateway.test_batches import begin, begin_with, gateway, over, request, requests, results

KEYS = RedisKeys("default")
NOBODY = ""  # the tenant where no keys are asked for


async def upload(client: openai.AsyncOpenAI, content: bytes, **options: Any) -> str:
    return (await client.files.create(**{"file": ("a.jsonl", content), "purpose": "batch", **options})).id


async def test_lines_that_find_no_worker_are_asked_again(server: RedisServer) -> None:
    async with gateway(server) as stack:
        stack.router.busy, stack.router.retry_after_s = True, 1
        batch = await begin(stack.client, requests(3))
        await eventually(lambda: stack.router.routes)
        stack.router.busy = False
        output, _ = await results(stack.client, await over(stack.client, batch))
        assert len(output) == 3
        metrics = (await stack.http.get("/metrics")).text
        assert 'ryzanstein_gateway_batch_requests_total{result="postponed"} 0.0' not in metrics


async def test_batch_fails_when_its_file_content_is_gone(server: RedisServer) -> None:
    async with gateway(server) as stack:
        file = await upload(stack.client, json.dumps(request("a")).encode())
        server.client.delete(KEYS.file_pieces(NOBODY, file))
        failed = await over(stack.client, await begin_with(stack.client, file))
        assert failed.status == "failed"
        assert failed.errors is not None
        assert [error.code for error in failed.errors.data or []] == ["input_file_gone"]
        with pytest.raises(openai.NotFoundError, match=f"No such File object: {file}"):
            await stack.client.files.content(file)


async def test_large_file_round_trips_byte_for_byte(server: RedisServer) -> None:
    async with gateway(server) as stack:
        content = bytes(range(256)) * 8192  # two reads
        file = await upload(stack.client, content)
        assert (await stack.client.files.content(file)).content == content
        assert server.client.llen(KEYS.file_pieces(NOBODY, file)) > 4


async def test_lines_that_are_too_many_or_too_long_fail_the_batch(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.gateway.batches.run.MOST_REQUESTS", 2)
    async with gateway(server, max_body_bytes=4096) as stack:
        lines = [request("long", prompt="x" * 5000), *requests(2)]
        failed = await over(stack.client, await begin(stack.client, lines))
        assert failed.errors is not None
        reported = [(error.line, error.code, error.message) for error in failed.errors.data or []]
        assert reported == [
            (1, "line_too_long", f"A line may have at most 4096 bytes, this one has {len(json.dumps(lines[0]))}."),
            (3, "too_many_requests", "A batch may have at most 2 requests."),
        ]


async def test_a_body_that_cannot_be_read_is_refused_by_its_endpoint(server: RedisServer) -> None:
    async with gateway(server) as stack:
        line = json.dumps(request("a", stream="X")).replace('"X"', "1e999")
        _, [error] = await results(stack.client, await over(stack.client, await begin(stack.client, [line])))
        assert error["response"]["status_code"] == 400
        assert error["response"]["body"]["error"]["param"] == "stream"


async def test_files_end_and_make_room(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.gateway.batches.runner._SWEEP_S", 0.05)
    async with gateway(server, batch_storage_bytes=2000, batch_tenant_bytes=5000) as stack:
        client = stack.client
        hour = await upload(client, b"x" * 1500, expires_after={"anchor": "created_at", "seconds": 3600})
        with pytest.raises(openai.APIStatusError, match="The files of all tenants may have at most 2000 bytes"):
            await upload(client, b"x" * 1500)
        with pytest.raises(openai.BadRequestError, match="The file's life is over before the window") as failure:
            await begin_with(client, hour)
        assert failure.value.param == "completion_window"
        other = await upload(client, b"x", purpose="fine-tune")
        with pytest.raises(openai.BadRequestError, match="has the purpose `fine-tune`; `batch` is needed"):
            await begin_with(client, other)
        await upload(client, b"x" * 100, expires_after={"anchor": "created_at", "seconds": 1})
        await eventually(lambda: server.client.hget(KEYS.file_usage, "total") == b"1501")
        assert [file.id async for file in client.files.list()] == [other, hour]
        monkeypatch.setattr("services.gateway.batches.files._MOST_FILES", 1)
        with pytest.raises(openai.APIStatusError, match="You may have at most 1 files; delete some"):
            await upload(client, b"x")


async def test_open_batches_of_a_tenant_are_limited_and_expired_batches_are_not_listed(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.gateway.batches.store._MOST_OPEN", 2)
    async with gateway(server, Worker("w0", step_s=0.2)) as stack:
        made = [await begin(stack.client, requests(20)) for _ in range(2)]
        with pytest.raises(openai.RateLimitError, match="At most 2 of your batches may be open at once"):
            await begin(stack.client, requests(1))
        for batch in made:
            await stack.client.batches.cancel(batch.id)
            assert (await over(stack.client, batch)).status == "cancelled"
        server.client.delete(KEYS.batch_jobs.job(KEYS.member(NOBODY, made[0].id)))
        assert [batch.id async for batch in stack.client.batches.list()] == [made[1].id]
        assert server.client.zcard(KEYS.batch_jobs.index(NOBODY)) == 1


async def test_rejected_form_names_the_wrong_field(server: RedisServer) -> None:
    file = {"file": ("a.jsonl", b"x")}
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"purpose": (None, "batch")}, "file"),
        ({**file, "expires_after[seconds]": (None, "60")}, "purpose"),
        ({**file, "purpose": (None, "batch"), "colour": (None, "red")}, "colour"),
    ]
    for name, value in (("anchor", "last_used_at"), ("seconds", "0"), ("seconds", "١")):
        field = f"expires_after[{name}]"
        wrong.append(({**file, "purpose": (None, "batch"), field: (None, value)}, field))
    async with gateway(server) as stack:
        for form, param in wrong:
            answer = await stack.http.post("/v1/files", files=form)
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == param
        assert server.client.hget(KEYS.file_usage, "total") in (None, b"0"), "what was refused leaves nothing"
