"""Parts of the REST clients that other transports lack: responses, files and batches, scores and ranks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from ryzanstein_client import (
    BadRequest,
    Message,
    NotFound,
    Page,
    ProtocolError,
    RetryPolicy,
    ServerError,
    StreamInterrupted,
    Tool,
    ToolCall,
    Unavailable,
)

from tests.integration.clients.serving import (
    DIRECT,
    PROMPT,
    Served,
    call,
    expected_text,
    followed,
    read,
    served,
    spelled,
)
from tests.integration.gateway.fleet import Fault, Worker
from tests.integration.gateway.redis_server import RedisServer
from tests.unit.gateway.made_tokenizers import byte_level

both_clients = pytest.mark.parametrize("kind", ["rest", "rest-async"])
one_client = pytest.mark.parametrize("kind", ["rest-async"])  # the blocking one is made of it


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
        short = await call(client, "upload_file", b"{}", expires_after_s=60)
        assert short.expires == short.created + 60
        assert await call(client, "download_file", file.id) == content
        batch = await call(client, "create_batch", file.id, "/v1/completions", metadata={"a": "b"})
        async with asyncio.timeout(60):
            while not batch.over:
                await asyncio.sleep(0.05)
                batch = await call(client, "batch", batch.id)
        assert (batch.status, batch.total, batch.completed, batch.failed) == ("completed", 2, 1, 1)
        assert batch.usage.completion_tokens == 5
        assert batch.expires == batch.created + 24 * 3600
        whole = batch
        answer = json.loads(await call(client, "download_file", batch.output_file_id))
        assert answer["response"]["body"]["choices"][0]["text"] == expected_text(2, 5)
        assert "temperature" in (await call(client, "download_file", batch.error_file_id)).decode()
        with pytest.raises(BadRequest):
            await call(client, "cancel_batch", batch.id)
        broken = await call(client, "upload_file", b"{}")
        batch = await call(client, "create_batch", broken.id, "/v1/completions")
        async with asyncio.timeout(60):
            while not batch.over:
                await asyncio.sleep(0.05)
                batch = await call(client, "batch", batch.id)
        assert batch.status == "failed"
        assert batch.errors[0].line == 1
        pages, after = [], None
        while after is not None or not pages:
            pages.append(await call(client, "batches", limit=1, after=after))
            after = pages[-1].after
        assert [page.items for page in pages] == [(batch,), (whole,)]
        newest = await call(client, "files", purpose="batch", limit=2)
        assert newest.items == (broken, short)
        assert (await call(client, "files", purpose="batch", after=newest.after)).items == (file,)
        written = (await call(client, "files", purpose="batch_output")).items
        assert {actual.id for actual in written} == {whole.output_file_id, whole.error_file_id}
        assert await call(client, "delete_file", file.id)
        for method in ("file", "download_file", "batch"):
            with pytest.raises(NotFound):
                await call(client, method, f"{file.id}/../x")


@one_client
async def test_creating_calls_are_not_retried_automatically(gateway: Served, kind: str) -> None:
    patience = replace(DIRECT, retries=RetryPolicy(max_retries=3, first_pause_s=0.01))
    async with gateway.client(kind, patience) as client:
        for method, arguments in (("upload_file", (b"{}",)), ("create_batch", ("file-x", "/v1/completions"))):
            gateway.http.cuts = [0] * 9
            with pytest.raises(Unavailable):
                await call(client, method, *arguments)
            assert len(gateway.http.cuts) == 8
        gateway.http.cuts = [0, 0]
        with pytest.raises(NotFound):
            await call(client, "batch", "batch_x")


@one_client
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


@one_client
async def test_responses_have_tools_reasoning_and_schemas(kind: str) -> None:
    message = '<think>Rome.</think><tool_call>{"name": "get_weather", "arguments": {"city": "Rome"}}</tool_call>'
    tools: list[Tool] = [{"name": "get_weather", "parameters": {"type": "object"}}]
    count = len(byte_level().encode(message).ids)
    async with served([spelled(message, end_at=count)]) as gateway, gateway.client(kind) as client:
        answer = await call(client, "respond", "hi", tools=tools, max_tokens=count + 1, reasoning_effort="low")
        (made,) = answer.tool_calls
        assert (made.name, json.loads(made.arguments), answer.reasoning) == ("get_weather", {"city": "Rome"}, "Rome.")
        counted = await call(client, "count_input_tokens", "hi", tools=tools, max_tokens=count, reasoning_effort="low")
        assert counted == answer.usage.prompt_tokens
        chunks, stream = await followed(client, "stream_response", "hi", tools=tools, max_tokens=count + 1)
        assert stream.response().reasoning == "".join(chunk.reasoning for chunk in chunks) == answer.reasoning
        (streamed,) = stream.completion().tool_calls
        assert stream.response().tool_calls == (streamed,)
        assert (streamed.name, streamed.arguments) == (made.name, made.arguments)
        assert chunks[-1].finish_reason == "tool_calls"
        submits = gateway.stack.workers[0].submits
        history = [Message("user", "hi"), Message("assistant", tool_calls=(made,), reasoning="Hm.")]
        history.append(Message("tool", "21 degrees", tool_call_id=made.id))
        await call(client, "respond", history, tools=tools, tool_choice="get_weather", max_tokens=1)
        prompt = byte_level().decode(list(submits[-1].prompt_ids))
        assert "get_weather" in prompt
        assert "21 degrees" in prompt
        assert "Hm." in prompt
        with pytest.raises(ValueError, match="Ada"):
            await call(client, "respond", [Message("user", "hi", name="Ada")])
        assert submits[-1].sampling.grammar
        named = {"type": "json_schema", "json_schema": {"schema": {"type": "integer"}, "strict": True}}
        await call(client, "respond", "hi", response_format=named, max_tokens=1)
        assert "integer" in submits[-1].sampling.grammar


@one_client
async def test_input_items_of_a_response_are_returned(gateway: Served, kind: str) -> None:
    made = ToolCall("call_1", "get_weather", '{"city": "Rome"}')
    given = [
        Message("user", "hi"),
        Message("assistant", reasoning="Rome."),
        Message("assistant", tool_calls=(made,)),
        Message("tool", "21", tool_call_id="call_1"),
        Message("developer", "naïve 🙂"),
    ]
    async with gateway.client(kind) as client:
        response = await call(client, "respond", given, max_tokens=1)
        assert await call(client, "response_input", response.id) == Page(tuple(given), None)
        first = await call(client, "response_input", response.id, limit=3)
        rest = await call(client, "response_input", response.id, limit=3, after=first.after)
        assert (first.items + rest.items, rest.after) == (tuple(given), None)
        with pytest.raises(NotFound):
            await call(client, "response_input", "resp_x")


@one_client
async def test_tokenized_chat_equals_its_prompt(kind: str) -> None:
    tools: list[Tool] = [{"name": "get_weather"}, {"name": "now"}]
    async with served([spelled("Hello.")]) as gateway, gateway.client(kind) as client:
        submits = gateway.stack.workers[0].submits
        for options in (
            {"max_tokens": 1, "seed": 5},
            {"max_tokens": 1, "tools": tools},
            {"max_tokens": 1, "tools": tools, "tool_choice": "none"},
        ):
            await call(client, "chat", [Message("user", "hi")], **options)
            n_before = len(submits)
            ids = await call(client, "tokenize_chat", [Message("user", "hi")], **options)
            assert ids == tuple(submits[-1].prompt_ids)
            assert len(submits) == n_before
        (model,) = await call(client, "models")
        assert await call(client, "model", model.id) == model
        with pytest.raises(NotFound, match="org/other"):
            await call(client, "model", "org/other")


@both_clients
async def test_streamed_response_equals_the_unstreamed_response(gateway: Served, kind: str) -> None:
    options = {"instructions": "Be brief.", "max_tokens": 8, "seed": 3, "logprobs": 2, "metadata": {"a": "b"}}
    async with gateway.client(kind) as client:
        whole = await call(client, "respond", "hi", **options)
        gateway.stack.workers[0].step_s = 0.05  # faster tokens travel together
        chunks, stream = await followed(client, "stream_response", "hi", **options)
        streamed = stream.response()
        assert (streamed.text, streamed.logprobs, streamed.status) == (whole.text, whole.logprobs, "incomplete")
        assert len(whole.logprobs) == 8
        assert len(whole.logprobs[0].top) >= 2
        assert "".join(chunk.text for chunk in chunks) == whole.text
        assert len(chunks) > 2
        assert tuple(token for chunk in chunks for token in chunk.logprobs) == whole.logprobs
        assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason or chunk.usage] == ["length"]
        assert stream.completion().usage == streamed.usage == whole.usage
        assert {chunk.request_id for chunk in chunks} == {streamed.id}
        assert streamed.stored
        assert await call(client, "response", streamed.id) == streamed
        _, second = await followed(
            client, "stream_response", "more", previous_response_id=streamed.id, store=False, max_tokens=1
        )
        assert not second.response().stored
        assert second.response().usage.prompt_tokens > streamed.usage.prompt_tokens


@one_client
async def test_prompt_tokens_are_counted_without_generating(gateway: Served, kind: str) -> None:
    async with gateway.client(kind) as client:
        ask = {"instructions": "Be brief.", "max_tokens": 2, "seed": 1, "store": True}
        first = await call(client, "respond", "hi", **ask)
        submits = list(gateway.stack.workers[0].submits)
        assert await call(client, "count_input_tokens", "hi", **ask) == first.usage.prompt_tokens
        counted = await call(client, "count_input_tokens", "more", previous_response_id=first.id)
        assert gateway.stack.workers[0].submits == submits
        second = await call(client, "respond", "more", previous_response_id=first.id, max_tokens=1)
        assert counted == second.usage.prompt_tokens
        talk = [Message("user", "?" * 100), Message("assistant", "?" * 100), Message("user", "?" * 100)]
        n_tokens = await call(client, "count_input_tokens", talk[2:])
        with pytest.raises(BadRequest) as long:
            await call(client, "count_input_tokens", talk)
        assert long.value.code == "context_length_exceeded"
        assert await call(client, "count_input_tokens", talk, truncation="auto") == n_tokens


@both_clients
async def test_a_streamed_response_fails_as_other_streams_do(kind: str) -> None:
    patience = replace(DIRECT, retries=RetryPolicy(max_retries=3, first_pause_s=0.01))
    workers = [Worker(name, faults=[Fault("break", 3), Fault("break", 3)]) for name in ("w0", "w1")]
    async with served(workers) as gateway, gateway.client(kind, patience) as client:
        with pytest.raises(StreamInterrupted) as broken:
            await read(client, "stream_response", "hi", seed=2, max_tokens=20)
        assert isinstance(broken.value.__cause__, ServerError | Unavailable)
        assert broken.value.text
        gateway.http.cuts = [0, 0]
        gateway.http.lose_all()
        chunks = await read(client, "stream_response", "hi", seed=2, max_tokens=2)
        assert not gateway.http.cuts
        assert chunks[-1].usage is not None
        with pytest.raises(BadRequest, match="temperature"):
            await read(client, "stream_response", "hi", temperature=-1)
        with pytest.raises(ProtocolError, match="has not ended"):
            client.stream_response("hi").response()


@one_client
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
        tokens = len(byte_level().encode("a cat").ids)
        cut = await call(client, "score", "a cat", "a cat that is much longer", truncate_prompt_tokens=tokens)
        assert cut.values == pytest.approx((1.0,))
        ranking = await call(
            client, "rerank", "a cat", ["a cat that is much longer", "a dog"], max_tokens_per_doc=tokens
        )
        assert (ranking.results[0].index, ranking.results[0].score) == (0, pytest.approx(1.0))
        with pytest.raises(NotFound):
            await call(client, "score", "a", "b", model="nope")
        with pytest.raises(BadRequest, match="documents"):
            await call(client, "rerank", "a", [])
