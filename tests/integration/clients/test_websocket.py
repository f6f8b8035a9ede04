"""Streams over WebSocket outlive their connections."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from ryzanstein_client import (
    AsyncClient,
    BadRequest,
    Chunk,
    Message,
    NotFound,
    ProtocolError,
    RetryPolicy,
    StreamInterrupted,
    TimedOut,
    Tool,
    Unauthorized,
    Unavailable,
)
from ryzanstein_client.websocket import WebSocketClient
from ryzanstein_client.websocket.generation import Generation

from services.gateway.tenants.keys import digest_of
from tests.integration.clients.serving import (
    DIRECT,
    PROMPT,
    Served,
    expected_ids,
    expected_text,
    served,
    spelled,
)
from tests.integration.gateway.fleet import Worker
from tests.integration.gateway.gateways import eventually
from tests.unit.gateway.made_tokenizers import byte_level

SOON = replace(DIRECT, retries=RetryPolicy(max_retries=6, first_pause_s=0.02))
COUNT = 60


@pytest.fixture
async def gateway() -> AsyncIterator[Served]:
    # A machine that stands still for a moment must not look like a worker that does: no attempt is repeated here.
    patient = {"progress_timeout_s": 30.0}
    async with served([Worker("w0", step_s=0.01)], **patient) as running:
        yield running


async def collected(client: WebSocketClient, **options: object) -> list[Chunk]:
    return [chunk async for chunk in client.stream_completion(PROMPT, **({"seed": 4, "max_tokens": COUNT} | options))]


def assert_whole(chunks: list[Chunk]) -> None:
    assert tuple(token for chunk in chunks for token in chunk.token_ids) == expected_ids(4, COUNT)
    assert "".join(chunk.text for chunk in chunks) == expected_text(4, COUNT)
    assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == ["length"]
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == COUNT


async def test_a_stream_and_a_chat(gateway: Served) -> None:
    async with WebSocketClient(gateway.http.ws, replace(DIRECT, session_id="mine")) as client:
        assert_whole(await collected(client))
        assert gateway.stack.router.routes[-1].session == "mine"
        stream = client.stream_chat([Message("user", "hi")], max_tokens=5)
        text = "".join([chunk.text async for chunk in stream])
        assert stream.completion().text == text
        assert len(stream.completion().token_ids) == 5
        named = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}}}
        assert [
            chunk async for chunk in client.stream_chat([Message("user", "hi")], max_tokens=1, response_format=named)
        ]
        assert "integer" in gateway.stack.workers[0].submits[-1].sampling.grammar


@pytest.mark.parametrize("cuts", [[600], [1000, 500], [500, 0, 0, 700], [900] * 8])
async def test_lost_connections_lose_no_token(gateway: Served, cuts: list[int]) -> None:
    async with WebSocketClient(gateway.http.ws, SOON) as client:
        gateway.http.cuts = list(cuts)
        assert_whole(await collected(client))
        assert gateway.http.connections >= 2
        assert len(gateway.stack.workers[0].submits) == 1, "resumed, not repeated"


async def test_a_connection_lost_before_the_start_is_begun_again(gateway: Served) -> None:
    async with WebSocketClient(gateway.http.ws, SOON) as client:
        gateway.http.cuts = [0, 150]
        assert_whole(await collected(client))


async def test_many_streams_lose_all_their_connections_at_once(gateway: Served) -> None:
    async with WebSocketClient(gateway.http.ws, SOON) as client:
        received: list[list[Chunk]] = [[] for _ in range(20)]

        async def read(chunks: list[Chunk]) -> None:
            async for chunk in client.stream_completion(PROMPT, seed=4, max_tokens=COUNT):
                chunks.append(chunk)  # noqa: PERF401  # watched while it grows

        async with asyncio.TaskGroup() as group:
            for chunks in received:
                group.create_task(read(chunks))
            await eventually(lambda: all(received))
            for _ in range(3):
                gateway.http.lose_all()
                await asyncio.sleep(0.05)
        for chunks in received:
            assert_whole(chunks)
        assert len(gateway.stack.workers[0].submits) == 20


async def test_a_server_that_does_not_come_back_interrupts(gateway: Served) -> None:
    async with WebSocketClient(gateway.http.ws, SOON) as client:
        gateway.http.cuts = [800, *[0] * 20]
        with pytest.raises(StreamInterrupted) as broken:
            await collected(client)
        assert isinstance(broken.value.__cause__, Unavailable)
        assert expected_text(4, COUNT).startswith(broken.value.text)
        assert broken.value.token_ids == expected_ids(4, len(broken.value.token_ids))
        assert broken.value.token_ids


async def test_a_generation_that_was_given_up_interrupts() -> None:
    worker = Worker("w0", step_s=0.02)
    async with (
        served([worker], stream_resume_window_s=0.01) as gateway,
        WebSocketClient(gateway.http.ws, SOON) as client,
    ):
        stream = client.stream_completion(PROMPT, max_tokens=200)
        await anext(stream)
        gateway.http.cuts = [0, 0]
        gateway.http.lose_all()
        await eventually(lambda: worker.cancelled)
        with pytest.raises(StreamInterrupted) as broken:
            _ = [chunk async for chunk in stream]
        assert isinstance(broken.value.__cause__, NotFound)


async def test_refusals_are_typed(gateway: Served) -> None:
    async with WebSocketClient(gateway.http.ws, SOON) as client:
        with pytest.raises(BadRequest) as bad:
            await collected(client, temperature=-1)
        assert bad.value.param == "temperature"
        with pytest.raises(NotFound):
            await collected(client, model="nope")
        with pytest.raises(TypeError, match="CompletionOptions has no tools"):
            client.stream_completion(PROMPT, tools=[])
    async with WebSocketClient("ws://127.0.0.1:9", SOON) as nobody:
        with pytest.raises(Unavailable):
            await collected(nobody)
    with pytest.raises(ValueError, match="ws://host:port"):
        WebSocketClient("ftp://x")


async def test_the_rest_clients_url_is_taken(gateway: Served) -> None:
    async with WebSocketClient(gateway.http.http, SOON) as client:
        assert_whole(await collected(client))


async def test_keys() -> None:
    entry = {"key_sha256": digest_of("secret"), "name": "acme"}
    async with served(tenancy=True, api_keys=json.dumps([entry])) as gateway:
        async with WebSocketClient(gateway.http.ws, replace(SOON, api_key="secret")) as client:
            assert_whole(await collected(client))
        async with WebSocketClient(gateway.http.ws, SOON) as client:
            with pytest.raises(Unauthorized):
                await collected(client)


async def test_closing_cancels(gateway: Served) -> None:
    worker = gateway.stack.workers[0]
    async with WebSocketClient(gateway.http.ws, SOON) as client:
        async with client.stream_completion(PROMPT, max_tokens=200) as stream:
            await anext(stream)
        await eventually(lambda: worker.cancelled)
        with pytest.raises(StreamInterrupted) as late:
            _ = [chunk async for chunk in client.stream_completion(PROMPT, max_tokens=200, timeout_s=1.0)]
        assert isinstance(late.value.__cause__, TimedOut)
        await eventually(lambda: len(worker.cancelled) == 2)
        chunks: list[Chunk] = []

        async def read() -> None:
            async for chunk in client.stream_completion(PROMPT, max_tokens=200):
                chunks.append(chunk)  # noqa: PERF401  # watched while it grows

        reading = asyncio.create_task(read())
        await eventually(lambda: chunks)
    with pytest.raises(StreamInterrupted):
        await reading
    await eventually(lambda: len(worker.cancelled) == 3)
    with pytest.raises(RuntimeError, match="closed"):
        await collected(client)


THINKS_AND_CALLS = (
    "<think>The city is named.</think>I look."
    '<tool_call>{"name": "get_weather", "arguments": {"city": "Rome", "days": [1, 2]}}</tool_call>'
    '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
)
TOOLS: list[Tool] = [{"name": "get_weather", "parameters": {"type": "object"}}, {"name": "now"}]


@pytest.mark.parametrize("cuts", [[], [900, 700, 700, 700, 700], [1500, 0, 400, 600]])
async def test_chat_equals_the_rest_chat_with_reasoning_calls_and_logprobs(cuts: list[int]) -> None:
    count = len(byte_level().encode(THINKS_AND_CALLS).ids)
    ask = {"max_tokens": count, "tools": TOOLS, "logprobs": 1}
    async with (
        served([spelled(THINKS_AND_CALLS, step_s=0.002)]) as gateway,
        AsyncClient(gateway.http.http, DIRECT) as rest,
        WebSocketClient(gateway.http.ws, SOON) as client,
    ):
        expected = await rest.chat([Message("user", "hi")], **ask)
        assert (expected.reasoning, expected.text) == ("The city is named.", "I look.")
        gateway.http.lose_all()
        gateway.http.cuts = list(cuts)
        stream = client.stream_chat([Message("user", "hi")], **ask)
        chunks = [chunk async for chunk in stream]
        actual = stream.completion()
        assert len(chunks) > 2
        assert gateway.http.connections >= 1 + len(cuts) // 2
        assert [(call.name, call.arguments) for call in actual.tool_calls] == [
            (call.name, call.arguments) for call in expected.tool_calls
        ]
        assert all(call.id for call in actual.tool_calls)
        same = {"tool_calls": (), "request_id": "", "token_ids": ()}
        assert replace(actual, **same) == replace(expected, **same)
        assert len(actual.token_ids) == count
        history = [
            Message("user", "hi"),
            Message("assistant", actual.text, actual.tool_calls),
            *[Message("tool", "21", tool_call_id=call.id) for call in actual.tool_calls],
        ]
        _ = [chunk async for chunk in client.stream_chat(history, **ask)]
        assert "get_weather" in byte_level().decode(list(gateway.stack.workers[0].submits[-1].prompt_ids))


async def test_completions_have_logprobs_and_follow_grammars(gateway: Served) -> None:
    async with AsyncClient(gateway.http.http, DIRECT) as rest, WebSocketClient(gateway.http.ws, SOON) as client:
        options = {"seed": 4, "max_tokens": 8, "logprobs": 2, "structured_outputs": {"json": {"type": "integer"}}}
        expected = await rest.complete(PROMPT, **options)
        stream = client.stream_completion(PROMPT, **options)
        _ = [chunk async for chunk in stream]
        assert (stream.completion().logprobs, stream.completion().text) == (expected.logprobs, expected.text)
        assert all(submit.sampling.grammar for submit in gateway.stack.workers[0].submits)


def token(index: int, text: str, ids: list[int], **fields: object) -> str:
    return json.dumps({"type": "token", "id": "g", "index": index, "text": text, "ids": ids, **fields})


def test_repeated_tokens_of_a_resumed_stream_are_dropped_by_index() -> None:
    generation = Generation("completion", {})
    assert json.loads(generation.opening())["type"] == "start"
    generation.read('{"type": "started", "id": "g", "token": "t", "model": "m", "prompt_tokens": 1}')
    generation.read(token(0, "one ", [1, 2]))
    generation.read(token(2, "two ", [3]))
    assert json.loads(generation.opening()) == {"type": "resume", "id": "g", "token": "t", "from": 3}
    assert generation.read(token(2, "two three ", [3, 4, 5])) == Chunk("three ", token_ids=(4, 5), model="m")
    assert generation.read(token(2, "two three ", [3, 4, 5])) is None
    with pytest.raises(ProtocolError, match="from 6"):
        generation.read(token(6, "", [9]))
    # A message after the last token begins at the next index: it is repeated when the connection is lost then.
    assert generation.read(token(5, "four", [])) == Chunk("four", model="m")
    generation.opening()
    assert generation.read(token(5, "four", [])) is None
    with pytest.raises(Unavailable, match="gave the generation up"):
        generation.read('{"type": "done", "id": "g", "finish_reason": "cancelled", "usage": {}}')
