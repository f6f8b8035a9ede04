"""Files and batches over a real Redis, with OpenAI's client: every line is answered once, on any gateway."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types import Batch

from services.gateway.tenants.keys import digest_of
from tests.integration.gateway.fleet import Worker
from tests.integration.gateway.gateways import GatewayStack, running_stack
from tests.integration.gateway.process import GatewayProcess, gateway_process
from tests.integration.gateway.redis_server import RedisServer

OVER = ("completed", "failed", "expired", "cancelled")
COMPLETIONS = "/v1/completions"


@asynccontextmanager
async def gateway(server: RedisServer, worker: Worker | None = None, **overrides: Any) -> AsyncIterator[GatewayStack]:
    async with running_stack([worker or Worker("w0")], redis_url=server.url, **overrides) as stack:
        yield stack


def request(custom_id: str, url: str = COMPLETIONS, **body: Any) -> dict[str, Any]:
    body = {"prompt": f"prompt of {custom_id}", "max_tokens": 3, "seed": 1} | body
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def requests(count: int) -> list[dict[str, Any]]:
    return [request(f"line-{number}") for number in range(count)]


async def begin(
    client: openai.AsyncOpenAI, lines: Sequence[dict[str, Any] | str], endpoint: str = COMPLETIONS, window: str = "24h"
) -> Batch:
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    file = await client.files.create(file=("in.jsonl", text.encode()), purpose="batch")
    return await begin_with(client, file.id, endpoint, window)


async def begin_with(
    client: openai.AsyncOpenAI, file_id: str, endpoint: Any = COMPLETIONS, window: Any = "24h"
) -> Batch:
    return await client.batches.create(
        input_file_id=file_id, endpoint=endpoint, completion_window=window, metadata={"what": "test"}
    )


async def until(condition: Callable[[], Awaitable[bool]], timeout_s: float = 120) -> None:
    async with asyncio.timeout(timeout_s):
        while not await condition():  # noqa: ASYNC110  # the event happens in another process
            await asyncio.sleep(0.05)


async def over(client: openai.AsyncOpenAI, batch: Batch, timeout_s: float = 120) -> Batch:
    async with asyncio.timeout(timeout_s):
        while batch.status not in OVER:
            await asyncio.sleep(0.05)
            batch = await client.batches.retrieve(batch.id)
    return batch


async def lines_of(client: openai.AsyncOpenAI, file_id: str | None) -> list[dict[str, Any]]:
    if file_id is None:
        return []
    content = await client.files.content(file_id)
    return [json.loads(line) for line in content.text.splitlines()]


async def results(client: openai.AsyncOpenAI, batch: Batch) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The lines of both files, after a look at what must hold for every batch."""
    output, errors = await lines_of(client, batch.output_file_id), await lines_of(client, batch.error_file_id)
    assert batch.request_counts is not None
    assert (batch.request_counts.completed, batch.request_counts.failed) == (len(output), len(errors))
    assert batch.request_counts.total == len(output) + len(errors)
    ids = [line["custom_id"] for line in output + errors]
    assert len(ids) == len(set(ids)), "a line was written twice"
    return output, errors


async def test_a_batch_is_answered_as_its_requests_would_be(server: RedisServer) -> None:
    async with gateway(server) as stack:
        batch = await begin(stack.client, requests(40))
        assert (batch.object, batch.status, batch.completion_window) == ("batch", "validating", "24h")
        assert batch.metadata == {"what": "test"}
        done = await over(stack.client, batch)
        assert done.status == "completed"
        assert done.error_file_id is None
        output, _ = await results(stack.client, done)
        assert {line["custom_id"] for line in output} == {f"line-{number}" for number in range(40)}
        for line in output[:3]:
            alone = await stack.complete(**request(line["custom_id"])["body"])
            assert line["response"]["status_code"] == 200
            assert line["response"]["body"]["choices"] == alone.json()["choices"]
        used = sum(line["response"]["body"]["usage"]["total_tokens"] for line in output)
        assert done.usage is not None
        assert done.usage.total_tokens == used
        assert all((done.in_progress_at, done.finalizing_at, done.completed_at, done.expires_at))
        assert all(submit.priority == 100 for submit in stack.workers[0].submits[:40]), "behind all others"
        file = await stack.client.files.retrieve(done.output_file_id or "")
        assert (file.purpose, file.filename) == ("batch_output", f"{batch.id}_output.jsonl")
        assert file.bytes == len((await stack.client.files.content(file.id)).content)


async def test_the_time_of_a_single_request_is_not_that_of_a_batch(server: RedisServer) -> None:
    async with gateway(server, Worker("w0", prefill_s=1.5), request_timeout_s=1.0) as stack:
        done, failed = await results(stack.client, await over(stack.client, await begin(stack.client, requests(2))))
        assert (len(done), failed) == (2, [])


async def test_chat_responses_and_embeddings(server: RedisServer) -> None:
    async with gateway(server) as stack:
        line = {
            "custom_id": "a",
            "method": "POST",
            "url": "/v1/responses",
            "body": {"input": "hi", "max_output_tokens": 16},
        }
        done = await over(stack.client, await begin(stack.client, [line], "/v1/responses"))
        output, _ = await results(stack.client, done)
        assert output[0]["response"]["body"]["object"] == "response"
        assert done.usage is not None
        assert done.usage.output_tokens == 16
        chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
        line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": chat | {"nonsense": 1}}
        done = await over(stack.client, await begin(stack.client, [line], "/v1/chat/completions"))
        output, _ = await results(stack.client, done)
        assert output[0]["response"]["body"]["object"] == "chat.completion"
        assert output[0]["response"]["ignored"] == "nonsense"
        line = {"custom_id": "a", "method": "POST", "url": "/v1/embeddings", "body": {"input": "hi"}}
        done = await over(stack.client, await begin(stack.client, [line], "/v1/embeddings"))
        output, _ = await results(stack.client, done)
        assert len(output[0]["response"]["body"]["data"][0]["embedding"]) == 4


async def test_requests_that_are_refused_go_to_the_error_file_with_line_and_reason(server: RedisServer) -> None:
    async with gateway(server) as stack:
        lines = [
            request("good"), "", request("hot", temperature=-1), request("other", model="nobody"),
            request("stream", stream=True),
        ]  # fmt: skip
        done = await over(stack.client, await begin(stack.client, lines))
        assert done.status == "completed"
        output, errors = await results(stack.client, done)
        assert [line["custom_id"] for line in output] == ["good"]
        reported = {line["custom_id"]: line for line in errors}
        assert {name: (line["line"], line["response"]["status_code"]) for name, line in reported.items()} == {
            "hot": (3, 400), "other": (4, 404), "stream": (5, 400),
        }  # fmt: skip
        params = {name: line["response"]["body"]["error"]["param"] for name, line in reported.items()}
        assert params == {"hot": "temperature", "other": "model", "stream": "stream"}


async def test_a_file_that_is_no_list_of_requests_fails_the_batch(server: RedisServer) -> None:
    async with gateway(server) as stack:
        lines = [
            request("a"), "{no json", request("a"), request("b", url="/v1/embeddings"), '{"custom_id": "c"}',
            '{"custom_id": "d", "method": "POST", "url": "/v1/completions", "body": []}',
            '{"custom_id": "e", "body": ' + "[" * 2000,
        ]  # fmt: skip
        done = await over(stack.client, await begin(stack.client, lines))
        assert done.status == "failed"
        assert done.output_file_id is None
        assert done.errors is not None
        assert [(error.line, error.code, error.param) for error in done.errors.data or []] == [
            (2, "invalid_json_line", None), (3, "duplicate_custom_id", "custom_id"), (4, "mismatched_url", "url"),
            (5, "missing_field", "method"), (6, "invalid_value", "body"), (7, "invalid_json_line", None),
        ]  # fmt: skip
        assert not stack.workers[0].submits, "no request of such a file is run"
        marked = await over(stack.client, await begin(stack.client, ["\ufeff" + json.dumps(request("a"))]))
        assert marked.status == "completed", "a byte-order mark is skipped"
        empty = await over(stack.client, await begin(stack.client, ["\n\n"]))
        assert empty.errors is not None
        assert [error.code for error in empty.errors.data or []] == ["empty_file"]


async def test_invalid_files_and_batches_are_rejected_by_field(server: RedisServer) -> None:
    limits = {"batch_file_bytes": 2000, "batch_tenant_bytes": 3000}
    async with gateway(server, **limits) as stack:
        client = stack.client
        file = await client.files.create(file=("a.jsonl", b"x" * 1900), purpose="batch")
        refused: list[tuple[Any, str]] = [
            (client.files.create(file=("a", b"x"), purpose="vision"), "purpose"),
            (client.files.create(file=("a", b""), purpose="batch"), "file"),
            (client.files.create(file=("a", b"x" * 2001), purpose="batch"), "file"),
            (client.files.create(file=("a", b"x" * 1500), purpose="batch"), "file"),
            (begin_with(client, file.id, endpoint="/v1/x"), "endpoint"),
            (begin_with(client, file.id, window="9d"), "completion_window"),
            (begin_with(client, "file-x"), "id"),
            (client.batches.list(limit=0), "limit"),
        ]  # fmt: skip
        for call, param in refused:
            with pytest.raises(openai.APIStatusError) as failure:
                await call
            assert 400 <= failure.value.status_code < 500
            assert failure.value.param == param
        for wrong in ({"data": {"purpose": "batch"}}, {"json": {}}, {"files": {"file": b"x"}}):
            assert (await stack.http.post("/v1/files", **wrong)).status_code in (400, 415)  # type: ignore[arg-type]
        assert [actual.id async for actual in client.files.list()] == [file.id], "what was refused leaves nothing"
        assert (await client.files.delete(file.id)).deleted
        assert server.client.hget("rz:default:file-usage", "total") == b"0"
        with pytest.raises(openai.NotFoundError):
            await client.files.content(file.id)


async def test_lists_have_pages(server: RedisServer) -> None:
    async with gateway(server) as stack:
        made = [(await begin(stack.client, requests(1))).id for _ in range(5)]
        assert [batch.id async for batch in stack.client.batches.list(limit=2)] == made[::-1]
        page = await stack.client.batches.list(limit=2, after=made[3])
        assert [batch.id for batch in page.data] == made[2:0:-1]
        assert page.has_more
        files = [file.id async for file in stack.client.files.list(limit=2, order="asc", purpose="batch")]
        assert len(files) == 5


async def test_cancelled_batch_keeps_its_finished_results(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.gateway.batches.run._AT_ONCE", 7)
    async with gateway(server, Worker("w0", step_s=0.2), batch_concurrency=2) as stack:
        batch = await begin(stack.client, requests(30))
        while not (batch.request_counts and batch.request_counts.completed):
            await asyncio.sleep(0.02)
            batch = await stack.client.batches.retrieve(batch.id)
        cancelling = await stack.client.batches.cancel(batch.id)
        assert cancelling.status == "cancelling"
        done = await over(stack.client, cancelling)
        assert done.status == "cancelled"
        output, errors = await results(stack.client, done)
        assert len(output) + len(errors) == 30
        assert output
        assert errors
        assert {line["error"]["code"] for line in errors} == {"batch_cancelled"}
        with pytest.raises(openai.BadRequestError) as failure:
            await stack.client.batches.cancel(batch.id)
        assert failure.value.code == "batch_not_cancellable"


async def test_a_window_that_is_over_ends_a_batch(server: RedisServer) -> None:
    async with gateway(server, Worker("w0", step_s=0.2), batch_concurrency=1) as stack:
        done = await over(stack.client, await begin(stack.client, requests(30), window="5s"))
        assert done.status == "expired"
        assert done.expired_at
        output, errors = await results(stack.client, done)
        assert len(output) + len(errors) == 30
        assert output
        assert {line["error"]["code"] for line in errors} == {"batch_expired"}


async def test_key_sees_only_its_own_batches_and_acts_until_removed(server: RedisServer) -> None:
    keys = [{"key_sha256": digest_of(key), "name": key, "requests_per_minute": 100} for key in ("ann", "bob")]
    server.client.set(f"rz:default:key:{digest_of('cid')}", json.dumps({"name": "cid", "max_concurrent": 2}))
    async with gateway(server, tenancy=True, api_keys=json.dumps(keys)) as stack:
        ann, bob, cid = (stack.client.with_options(api_key=key) for key in ("ann", "bob", "cid"))
        done = await over(ann, await begin(ann, requests(3)))
        assert {submit.tenant for submit in stack.workers[0].submits} == {"ann"}
        assert [batch.id async for batch in bob.batches.list()] == []
        assert [file.id async for file in bob.files.list()] == []
        output = done.output_file_id or ""
        calls: list[Any] = [bob.batches.retrieve(done.id), bob.batches.cancel(done.id), bob.files.content(output)]
        for call in [*calls, bob.files.delete(output), begin_with(bob, done.input_file_id)]:
            with pytest.raises(openai.NotFoundError):
                await call
        limited = await over(cid, await begin(cid, requests(20)))
        assert len((await results(cid, limited))[0]) == 20, "what limits refuse is asked again"


async def test_batches_wait_while_redis_is_away(server: RedisServer) -> None:
    async with gateway(server, Worker("w0", step_s=0.02), batch_concurrency=2) as stack:
        batch = await begin(stack.client, requests(30))
        while not (batch.request_counts and batch.request_counts.completed):
            await asyncio.sleep(0.02)
            batch = await stack.client.batches.retrieve(batch.id)
        server.freeze()
        body = {"input_file_id": "file-a", "endpoint": COMPLETIONS, "completion_window": "24h"}
        for refused in await asyncio.gather(
            stack.http.get("/v1/batches"),
            stack.http.post("/v1/batches", json=body),
            stack.http.post("/v1/files", files={"purpose": (None, "batch"), "file": ("a", b"x")}),
            stack.http.post("/v1/fine_tuning/jobs", json={"model": "m", "training_file": "file-a"}),
        ):
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "storage_unavailable"
            assert int(refused.headers["retry-after"]) >= 1
        server.thaw()
        await until(lambda: serves(stack))
        output, _ = await results(stack.client, await over(stack.client, batch))
        assert len(output) == 30


async def test_a_key_that_is_taken_away_answers_no_further_line(server: RedisServer) -> None:
    server.client.set(f"rz:default:key:{digest_of('old')}", json.dumps({"name": "ann", "max_concurrent": 2}))
    fixed = json.dumps([{"key_sha256": digest_of("other"), "name": "ann"}])
    async with gateway(server, Worker("w0", step_s=0.2), tenancy=True, api_keys=fixed) as stack:
        batch = await begin(stack.client.with_options(api_key="old"), requests(30))
        await until(lambda: answered(stack.client.with_options(api_key="other"), batch))
    server.client.delete(f"rz:default:key:{digest_of('old')}")
    async with gateway(server, tenancy=True, api_keys=fixed) as stack:
        ann = stack.client.with_options(api_key="other")
        output, errors = await results(ann, await over(ann, batch))
        assert len(output) + len(errors) == 30
        assert output
        assert {line["response"]["status_code"] for line in errors} == {401}


async def answered(client: openai.AsyncOpenAI, batch: Batch) -> bool:
    counts = (await client.batches.retrieve(batch.id)).request_counts
    return counts is not None and counts.completed > 0


async def test_a_batch_waits_for_room_for_its_answers(server: RedisServer) -> None:
    async with gateway(server, batch_tenant_bytes=8000) as stack:
        pad = await stack.client.files.create(file=("pad", b"x" * 5000), purpose="batch")
        batch = await begin(stack.client, requests(10))
        await until(lambda: answered(stack.client, batch))
        await asyncio.sleep(0.3)
        assert (await stack.client.batches.retrieve(batch.id)).status == "in_progress"
        assert int(server.client.hget("rz:default:file-usage", "total") or 0) <= 8000
        await stack.client.files.delete(pad.id)
        output, _ = await results(stack.client, await over(stack.client, batch))
        assert len(output) == 10


async def serves(stack: GatewayStack) -> bool:
    return (await stack.http.get("/v1/batches")).status_code == 200


async def test_batch_continues_on_another_gateway_when_its_gateway_is_killed_or_drained(
    server: RedisServer, tmp_path: Path
) -> None:
    environment = {"REDIS_URL": server.url, "BATCH_CONCURRENCY": "4", "REDIS_TIMEOUT_S": "5"}
    worker = Worker("w0", step_s=0.2)
    async with gateway(server, worker, batch_concurrency=4) as stack:
        address = stack.router.address
        async with (
            gateway_process(address, tmp_path / "a.log", **environment) as killed,
            gateway_process(address, tmp_path / "b.log", **environment) as drained,
        ):
            batches = []
            for process in (killed, drained):
                client = openai.AsyncOpenAI(base_url=f"{process.url}/v1", api_key="unused")
                batches += [await begin(client, requests(30)) for _ in range(3)]
            await until(lambda: works(stack, killed))
            await until(lambda: works(stack, drained))
            worker.step_s = 0.01
            killed.process.send_signal(signal.SIGKILL)
            drained.process.terminate()
            await asyncio.gather(killed.process.wait(), drained.process.wait())
            assert drained.process.returncode == 0
            done = [await over(stack.client, batch) for batch in batches]
        for batch in done:
            assert batch.status == "completed"
            output, errors = await results(stack.client, batch)
            assert (len(output), len(errors)) == (30, 0)


async def works(stack: GatewayStack, process: GatewayProcess) -> bool:
    """Whether a gateway works on batches and has answered something."""
    metrics = (await stack.http.get(f"{process.url}/metrics")).text
    values = {
        line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in metrics.splitlines() if line[0] != "#"
    }
    answered = values.get('ryzanstein_gateway_batch_requests_total{result="completed"}', 0)
    return values["ryzanstein_gateway_batches_running"] > 0 and answered > 5
