"""What the REST clients have beyond the other transports: responses, files and batches, scores and ranks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from ryzanstein_client import BadRequest, Message, NotFound, RetryPolicy, Tool, Unavailable

from tests.integration.clients.serving import DIRECT, PROMPT, Served, call, expected_text, served, spelled
from tests.integration.gateway.redis_server import RedisServer, running_redis
from tests.unit.gateway.made_tokenizers import byte_level

both_clients = pytest.mark.parametrize("kind", ["rest", "rest-async"])


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with running_redis(tmp_path) as running:
        yield running


@pytest.fixture
async def gateway(server: RedisServer) -> AsyncIterator[Served]:
    async with served(redis_url=server.url) as running:
        yield running


@both_clients
async def test_a_batch_from_its_file_to_its_answers(gateway: Served, kind: str) -> None:
    body = {"prompt": PROMPT, "max_tokens": 5, "seed": 2}
    bodies = [body, {**body, "temperature": -1}]
    lines = [
        json.dumps({"custom_id": f"{place}", "method": "POST", "url": "/v1/completions", "body": body})
        for place, body in enumerate(bodies)
    ]
    async with gateway.client(kind) as client:
        content = "\n".join(lines).encode()
        file = await call(client, "upload_file", content, "naïve.jsonl")
        assert (file.filename, file.size, file.purpose) == ("naïve.jsonl", len(content), "batch")
        assert await call(client, "file", file.id) == file
        assert await call(client, "download_file", file.id) == content
        batch = await call(client, "create_batch", file.id, "/v1/completions", metadata={"a": "b"})
        async with asyncio.timeout(20):
            while not batch.over:
                await asyncio.sleep(0.05)
                batch = await call(client, "batch", batch.id)
        assert (batch.status, batch.total, batch.completed, batch.failed) == ("completed", 2, 1, 1)
        assert batch.usage.completion_tokens == 5
        answer = json.loads(await call(client, "download_file", batch.output_file_id))
        assert answer["response"]["body"]["choices"][0]["text"] == expected_text(2, 5)
        assert "temperature" in (await call(client, "download_file", batch.error_file_id)).decode()
        with pytest.raises(BadRequest):
            await call(client, "cancel_batch", batch.id)
        broken = await call(client, "upload_file", b"{}")
        batch = await call(client, "create_batch", broken.id, "/v1/completions")
        async with asyncio.timeout(20):
            while not batch.over:
                await asyncio.sleep(0.05)
                batch = await call(client, "batch", batch.id)
        assert batch.status == "failed"
        assert batch.errors[0].line == 1
        assert await call(client, "delete_file", file.id)
        for method in ("file", "download_file", "batch"):
            with pytest.raises(NotFound):
                await call(client, method, f"{file.id}/../x")


@both_clients
async def test_what_makes_something_is_not_repeated_by_itself(gateway: Served, kind: str) -> None:
    patience = replace(DIRECT, retries=RetryPolicy(max_retries=3, first_pause_s=0.01))
    async with gateway.client(kind, patience) as client:
        for method, asked in (("upload_file", (b"{}",)), ("create_batch", ("file-x", "/v1/completions"))):
            gateway.http.cuts = [0] * 9
            with pytest.raises(Unavailable):
                await call(client, method, *asked)
            assert len(gateway.http.cuts) == 8
        gateway.http.cuts = [0, 0]
        with pytest.raises(NotFound):
            await call(client, "batch", "batch_x")


@both_clients
async def test_responses_go_on_from_each_other(gateway: Served, kind: str) -> None:
    async with gateway.client(kind) as client:
        first = await call(client, "respond", "hi", instructions="Be brief.", max_tokens=6, seed=1)
        assert (first.status, first.incomplete_reason) == ("incomplete", "max_output_tokens")
        assert (first.usage.completion_tokens, first.stored) == (6, True)
        assert await call(client, "response", first.id) == first
        second = await call(client, "respond", [Message("user", "more")], previous_response_id=first.id, max_tokens=2)
        prompt = byte_level().decode(list(gateway.stack.workers[0].submits[-1].prompt_ids), skip_special_tokens=False)
        assert "hi" in prompt
        assert first.text in prompt
        assert prompt.index("more") > prompt.index("hi")
        assert await call(client, "delete_response", first.id)
        with pytest.raises(NotFound):
            await call(client, "response", first.id)
        with pytest.raises(BadRequest, match="not kept any more"):
            await call(client, "respond", "x", previous_response_id=second.id)
        assert not (await call(client, "respond", "hi", store=False, max_tokens=1)).stored
        with pytest.raises(TypeError, match="no logit_bias"):
            await call(client, "respond", "hi", logit_bias={1: 1.0})


@both_clients
async def test_responses_have_tools_reasoning_and_schemas(kind: str) -> None:
    said = '<think>Rome.</think><tool_call>{"name": "get_weather", "arguments": {"city": "Rome"}}</tool_call>'
    tools: list[Tool] = [{"name": "get_weather", "parameters": {"type": "object"}}]
    count = len(byte_level().encode(said).ids)
    async with served([spelled(said)]) as gateway, gateway.client(kind) as client:
        answer = await call(client, "respond", "hi", tools=tools, max_tokens=count, reasoning_effort="low")
        (made,) = answer.tool_calls
        assert (made.name, json.loads(made.arguments), answer.reasoning) == ("get_weather", {"city": "Rome"}, "Rome.")
        submits = gateway.stack.workers[0].submits
        history = [Message("user", "hi"), Message("assistant", tool_calls=(made,))]
        history.append(Message("tool", "21 degrees", tool_call_id=made.id))
        await call(client, "respond", history, tools=tools, tool_choice="get_weather", max_tokens=1)
        prompt = byte_level().decode(list(submits[-1].prompt_ids))
        assert "get_weather" in prompt
        assert "21 degrees" in prompt
        assert submits[-1].sampling.grammar
        named = {"type": "json_schema", "json_schema": {"schema": {"type": "integer"}, "strict": True}}
        await call(client, "respond", "hi", response_format=named, max_tokens=1)
        assert "integer" in submits[-1].sampling.grammar


@both_clients
async def test_scores_and_ranks(gateway: Served, kind: str) -> None:
    async with gateway.client(kind) as client:
        scores = await call(client, "score", "a cat", ["a cat", "something that is much longer"])
        assert scores.values[0] == pytest.approx(1.0)
        assert scores.values[1] < scores.values[0]
        assert scores.usage.prompt_tokens > 0
        documents = ["something that is much longer", "a cat", "a dog"]
        ranking = await call(client, "rerank", "a cat", documents, top_n=2)
        assert ranking.results[0].index == 1
        assert len(ranking.results) == 2
        assert ranking.results[0].score == pytest.approx(1.0)
        with pytest.raises(NotFound):
            await call(client, "score", "a", "b", model="nope")
        with pytest.raises(BadRequest, match="documents"):
            await call(client, "rerank", "a", [])
