"""/v1/responses/input_tokens says what the response's own usage says then, and runs nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from tests.integration.gateway.fleet import CHAT_TEMPLATE, MAX_LEN, MODEL, Worker
from tests.integration.gateway.gateways import GatewayStack, running_stack
from tests.integration.gateway.redis_server import RedisServer
from tests.integration.gateway.test_tenants import entry, tenancy

PATH = "/v1/responses/input_tokens"
TOOL: Any = {"type": "function", "name": "look", "description": "Look it up", "parameters": {"type": "object"}}


@pytest.fixture
async def stack(server: RedisServer) -> AsyncIterator[GatewayStack]:
    template = "<tool_call>{% for t in tools or [] %}{{ t.function.name }}{% endfor %}" + CHAT_TEMPLATE
    async with running_stack([Worker("w0", template=template)], redis_url=server.url) as running:
        yield running


def submitted(stack: GatewayStack) -> int:
    return len(stack.workers[0].submits)


async def test_counted_input_tokens_equal_usage_of_the_response(stack: GatewayStack) -> None:
    first = await stack.client.responses.create(model=MODEL, input="one", max_output_tokens=2)
    turns: list[dict[str, Any]] = [
        {"input": "a text", "instructions": "Be brief."},
        {"input": [{"role": "user", "content": "a turn"}], "previous_response_id": first.id},
        {"input": "with tools", "tools": [TOOL], "tool_choice": "auto"},
        {"input": [{"role": "user", "content": "word " * 12}] * 40, "truncation": "auto"},
    ]
    counts = []
    for turn in turns:
        before = submitted(stack)
        counted = await stack.client.responses.input_tokens.count(model=MODEL, **turn)
        assert submitted(stack) == before, "nothing is generated"
        response = await stack.client.responses.create(model=MODEL, max_output_tokens=1, store=False, **turn)
        assert response.usage is not None
        assert (counted.object, counted.input_tokens) == ("response.input_tokens", response.usage.input_tokens)
        counts.append(counted.input_tokens)
    assert len(set(counts)) == len(counts)
    assert counts[-1] <= MAX_LEN


async def test_wrong_bodies_are_refused_by_field(stack: GatewayStack) -> None:
    for body, param, code in (
        ({}, "input", "missing_field"),
        ({"input": []}, "input", "invalid_value"),
        ({"input": [{"type": "item_reference", "id": "msg_none"}]}, "input", "item_not_found"),
        ({"input": "a", "previous_response_id": "resp_none"}, "previous_response_id", "previous_response_not_found"),
        ({"input": "word " * MAX_LEN}, "input", "context_length_exceeded"),
    ):
        answer = await stack.http.post(PATH, json=body)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"], error["code"]) == (400, param, code), answer.text
    answer = await stack.http.post(PATH, json={"input": "a", "conversation": "conv_1"})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (404, "conversation", "conversation_not_found")
    assert submitted(stack) == 0
    read = await stack.http.get(PATH)
    assert (read.status_code, read.headers["allow"]) == (405, "POST"), "it is no kept response"
    with pytest.raises(openai.NotFoundError):
        await stack.client.responses.input_tokens.count(model="unknown", input="a")


async def test_input_token_count_needs_a_key_and_counts_as_a_request(server: RedisServer) -> None:
    async with tenancy(server, entry("secret", requests_per_minute=1)) as stack:
        assert (await stack.http.post(PATH, json={"input": "a"})).status_code == 401
        headers = {"authorization": "Bearer secret"}
        counted = await stack.http.post(PATH, json={"input": "a"}, headers=headers)
        assert (counted.status_code, counted.headers["x-ratelimit-remaining-requests"]) == (200, "0")
        assert (await stack.http.post(PATH, json={"input": "a"}, headers=headers)).status_code == 429
