"""The cases of Open Responses' compliance test, by their names, on scripted workers.

Answers have the fields that its types require, and streams no event that it does not know. The published types
themselves read answers of the bundled model in `tests/e2e/clients/openresponses`.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
import websockets

from services.gateway.http.responses.origin import OPEN_RESPONSES_HEADER
from tests.integration.gateway import fleet
from tests.integration.gateway.fleet import CHAT_TEMPLATE, MODEL, Fault, Worker
from tests.integration.gateway.gateways import GatewayStack, running_stack
from tests.integration.gateway.redis_server import RedisServer
from tests.integration.gateway.test_files import URL as FILE
from tests.integration.gateway.test_images import URL as IMAGE
from tests.integration.gateway.test_images import seeing
from tests.integration.gateway.test_responses import PATH, REQUIRED, events_of
from tests.unit.gateway.made_tokenizers import byte_level

DONE = "data: [DONE]\n\n"
NAMED = {OPEN_RESPONSES_HEADER: "latest"}
KINDS = {
    *(f"response.{state}" for state in ("created", "queued", "in_progress", "completed", "failed", "incomplete")),
    *(f"response.{what}.{change}" for what in ("output_item", "content_part") for change in ("added", "done")),
    *(
        f"response.{what}.{change}"
        for what in ("output_text", "refusal", "function_call_arguments", "reasoning", "reasoning_summary_text")
        for change in ("delta", "done")
    ),
}
TOOL = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather of a place",
    "parameters": {"type": "object", "properties": {"location": {"type": "string"}}, "required": ["location"]},
}
CALL = '<tool_call>{"name": "get_weather", "arguments": {"location": "Oslo"}}</tool_call>'
REASONED = "<think>First.</think>Four."


def writing(text: str, template: str = CHAT_TEMPLATE) -> Worker:
    """A worker that answers with a text."""
    ids = byte_level().encode(text).ids
    return Worker("w0", token=lambda prompt, seed, position: ids[position], end_at=len(ids), template=template)


def thinking() -> Worker:
    return writing(REASONED, CHAT_TEMPLATE + "{# <think> #}")


def calling() -> Worker:
    return writing(CALL, "{% if tools %}<tool_call>{% endif %}" + CHAT_TEMPLATE)


@pytest.fixture
async def stack(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[GatewayStack]:
    monkeypatch.setattr(fleet, "MAX_LEN", 2048)
    async with running_stack([thinking()], redis_url=server.url) as running:
        yield running


def said(role: str, content: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": content, **fields}


def is_whole(response: dict[str, Any], *kinds: str) -> None:
    """A response that is complete, has every required field, and items of these types."""
    assert not set(REQUIRED) - response.keys()
    assert response["status"] == "completed"
    assert [item["type"] for item in response["output"]] == list(kinds)


async def ask(stack: GatewayStack, **fields: Any) -> dict[str, Any]:
    answer = await stack.http.post(PATH, json={"model": MODEL, **fields}, headers=NAMED)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


async def stream(stack: GatewayStack, **fields: Any) -> list[dict[str, Any]]:
    """The events of a stream, which ends with the mark of the end."""
    answer = await stack.http.post(PATH, json={"model": MODEL, "stream": True, **fields}, headers=NAMED)
    assert answer.text.endswith(DONE)
    events = events_of(answer.text.removesuffix(DONE))
    assert {event["type"] for event in events} <= KINDS
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


TEXTS: dict[str, Any] = {
    "basic-response": [said("user", "Say hello in three words.")],
    "system-prompt": [said("system", "You are a sailor."), said("user", "Say hello.")],
    "assistant-phase": [
        said("assistant", "I look it up.", phase="commentary"),
        said("assistant", "It is four.", phase="final_answer"),
        said("user", "The number alone."),
    ],
    "multi-turn": [said("user", "I am Ada."), said("assistant", "Hello Ada!"), said("user", "Who am I?")],
    "file-input": [
        said(
            "user",
            [
                {"type": "input_text", "text": "The title alone."},
                {"type": "input_file", "filename": "heron.pdf", "file_data": FILE},
            ],
        )
    ],
}


@pytest.mark.parametrize("case", TEXTS)
async def test_a_text_is_answered(stack: GatewayStack, case: str) -> None:
    is_whole(await ask(stack, input=TEXTS[case]), "reasoning", "message")


async def test_image_input() -> None:
    worker = seeing()
    worker.end_at = 3
    async with running_stack([worker]) as stack:
        parts = [{"type": "input_text", "text": "What is it?"}, {"type": "input_image", "image_url": IMAGE}]
        is_whole(await ask(stack, input=[said("user", parts)]), "message")


async def test_streaming_response(stack: GatewayStack) -> None:
    events = await stream(stack, input=[said("user", "Count to five.")])
    assert events[0]["type"] == "response.created"
    is_whole(events[-1]["response"], "reasoning", "message")
    for kind, text in (("reasoning", "First."), ("output_text", "Four.")):
        assert "".join(event["delta"] for event in events if event["type"] == f"response.{kind}.delta") == text


async def test_stream_without_the_header_is_openais(stack: GatewayStack) -> None:
    answer = await stack.http.post(PATH, json={"input": "Four?", "stream": True})
    kinds = [event["type"] for event in events_of(answer.text)]
    assert "response.reasoning_text.delta" in kinds
    assert kinds[-1] == "response.completed"


async def test_error_of_a_stream_has_the_shape_of_its_client(server: RedisServer) -> None:
    worker = Worker("w0", step_s=0.3)
    async with running_stack([worker], redis_url=server.url, sse_heartbeat_s=0.1) as stack:
        for headers, nested in ((NAMED, True), ({}, False)):
            worker.faults = [Fault("refuse", 0)]
            answer = await stack.http.post(PATH, json={"input": "a", "stream": True}, headers=headers)
            assert answer.text.endswith(DONE) == nested
            (event,) = events_of(answer.text.removesuffix(DONE))
            error = event["error"] if nested else event
            assert (event["type"], error["code"], event["status"]) == ("error", "context_length_exceeded", 400)
            assert not nested or error["type"] == "invalid_request_error"


async def test_previous_response_id(stack: GatewayStack) -> None:
    first = await ask(stack, input="The word is papaya.")
    second = await ask(stack, input="Which word?", previous_response_id=first["id"])
    is_whole(second, "reasoning", "message")
    assert second["previous_response_id"] == first["id"]


async def test_tool_calling_and_the_way_back(server: RedisServer) -> None:
    async with running_stack([calling()], redis_url=server.url) as stack:
        question = {"input": [said("user", "How warm is it in Oslo?")], "tools": [TOOL]}
        first = await ask(stack, **question)
        is_whole(first, "function_call")
        events = await stream(stack, **question)
        kinds = [event["type"] for event in events]
        assert {f"response.function_call_arguments.{change}" for change in ("delta", "done")} <= set(kinds)
        for kind in ("response.output_item.added", "response.output_item.done"):
            assert [event["item"]["type"] for event in events if event["type"] == kind] == ["function_call"]
        (call,) = first["output"]
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "18 degrees"}
        second = await ask(stack, input=[result], previous_response_id=first["id"])
        assert second["status"] == "completed"
        assert second["output"]


async def test_compact_response_and_the_chain_after_a_summary(stack: GatewayStack) -> None:
    items = [said("user", "We start on Tuesday."), said("assistant", "On Tuesday.")]
    path = f"{PATH}/compact"
    body = {"model": MODEL, "prompt_cache_key": "test", "input": items}
    compacted = (await stack.http.post(path, json=body)).json()
    assert compacted["object"] == "response.compaction"
    assert [item["type"] for item in compacted["output"]] == ["compaction"]
    assert (await stack.http.post(path, json={"input": items})).status_code == 400, "compact-missing-model"
    (turn,) = await turns(stack, [{"input": [*compacted["output"], said("user", "Go on.")], "tools": []}])
    is_whole(turn[-1]["response"], "reasoning", "message")


@asynccontextmanager
async def socket_of(stack: GatewayStack) -> AsyncIterator[websockets.ClientConnection]:
    url = f"ws{stack.url[4:]}{PATH}"
    async with websockets.connect(url, proxy=None, additional_headers=NAMED) as socket:
        yield socket


async def turn_on(socket: websockets.ClientConnection, fields: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of one response."""
    await socket.send(json.dumps({"type": "response.create", "model": MODEL, "store": False, **fields}))
    events: list[dict[str, Any]] = []
    over = {"error", *(f"response.{status}" for status in ("completed", "failed", "incomplete"))}
    while not events or events[-1]["type"] not in over:
        events.append(json.loads(await socket.recv()))
    assert {event["type"] for event in events} <= {*KINDS, "error"}
    return events


async def turns(stack: GatewayStack, bodies: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The events of responses that follow each other over one connection."""
    async with socket_of(stack) as socket:
        return [await turn_on(socket, body) for body in bodies]


def is_lost(events: list[dict[str, Any]]) -> None:
    (event,) = events
    assert (event["type"], event["status"]) == ("error", 400)
    assert event["error"]["code"] == "previous_response_not_found"


async def test_websocket_responses_follow_each_other_and_go_on(stack: GatewayStack) -> None:
    async with socket_of(stack) as socket:
        first = (await turn_on(socket, {"input": "The word is cobalt."}))[-1]["response"]
        is_whole(first, "reasoning", "message")
        more = {"input": "Which word?", "previous_response_id": first["id"]}
        is_whole((await turn_on(socket, more))[-1]["response"], "reasoning", "message")
        is_whole((await turn_on(socket, {"input": "Another one."}))[-1]["response"], "reasoning", "message")


async def test_websocket_turn_that_is_not_stored_is_lost_after_a_reconnect(stack: GatewayStack) -> None:
    (turn,) = await turns(stack, [{"input": "The word is copper."}])
    lost = {"input": "Go on.", "previous_response_id": turn[-1]["response"]["id"]}
    missed, recovered = await turns(stack, [lost, {"input": [said("user", "Begin anew.")]}])
    is_lost(missed)
    is_whole(recovered[-1]["response"], "reasoning", "message")
    (unknown,) = await turns(stack, [{"input": "a", "previous_response_id": "resp_missing"}])
    is_lost(unknown)


async def test_websocket_turn_is_forgotten_when_its_lane_fails_to_go_on(stack: GatewayStack) -> None:
    wrong = {"type": "function_call_output", "call_id": "call_missing", "output": "No such call."}
    async with socket_of(stack) as socket:
        first = (await turn_on(socket, {"input": "The word is ember."}))[-1]["response"]
        previous = {"previous_response_id": first["id"]}
        fork = await turn_on(socket, {**previous, "input": [wrong], "stream_id": "other"})
        assert fork[-1]["status"] == 400
        is_whole((await turn_on(socket, {**previous, "input": "Go on."}))[-1]["response"], "reasoning", "message")
        failed = await turn_on(socket, {**previous, "input": [wrong]})
        assert (failed[-1]["type"], failed[-1]["status"]) == ("error", 400)
        is_lost(await turn_on(socket, {**previous, "input": "Go on."}))
