"""OpenAI's Responses with the official client against the real system: text, schemas, tools, memory, errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field

from tests.stack import RunningStack

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "unit": {"enum": ["C", "F"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
TOOL: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "Of a city",
    "parameters": WEATHER,
    "strict": True,
}
COMMON: dict[str, Any] = {"model": "ryzanstein-tiny", "max_output_tokens": 400, "extra_body": {"seed": 4}}


class Person(BaseModel):
    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=99)


@pytest.fixture(scope="module")
def client(stack: RunningStack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="unused", max_retries=0, timeout=60) as client:
        yield client


def test_a_stream_is_the_whole_response(client: openai.OpenAI) -> None:
    ask = {**COMMON, "max_output_tokens": 24, "instructions": "Be brief.", "input": "How warm is it?"}
    whole = client.responses.create(**ask)
    assert whole.usage is not None
    with client.responses.stream(**ask) as events:
        pieces = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(pieces) == whole.output_text != ""
    raw = list(client.responses.create(**ask, stream=True))
    assert raw[-1].type in ("response.completed", "response.incomplete")
    final = raw[-1].response
    assert (final.output_text, final.status) == (whole.output_text, whole.status)
    assert final.usage is not None
    assert final.usage.output_tokens == whole.usage.output_tokens
    assert (whole.incomplete_details is not None) == (whole.status == "incomplete")


def test_response_parses_into_a_pydantic_model_streamed_or_not(client: openai.OpenAI) -> None:
    ask = {**COMMON, "input": "Who?", "text_format": Person}
    parsed = client.responses.parse(**ask)
    assert parsed.status == "completed"
    assert isinstance(parsed.output_parsed, Person)
    with client.responses.stream(**ask) as events:
        for _ in events:
            pass
        assert events.get_final_response().output_parsed == parsed.output_parsed
    free = client.responses.create(**COMMON, input="Say it in JSON.", text={"format": {"type": "json_object"}})
    assert free.status == "incomplete" or isinstance(json.loads(free.output_text), dict)


def test_a_function_is_called_and_its_result_goes_on(client: openai.OpenAI) -> None:
    ask = {**COMMON, "tools": [TOOL]}
    first = client.responses.create(**ask, input="How warm is it?", tool_choice="required", parallel_tool_calls=False)
    (call,) = first.output
    assert call.type == "function_call"
    jsonschema.validate(json.loads(call.arguments), WEATHER)
    streamed = client.responses.create(
        **ask, input="How warm is it?", tool_choice={"type": "function", "name": "get_weather"}, stream=True
    )
    kinds = [event.type for event in streamed]
    assert kinds.count("response.function_call_arguments.done") == 1
    assert "response.function_call_arguments.delta" in kinds
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": '{"degrees": 21}'}
    by_memory = client.responses.create(**ask, previous_response_id=first.id, input=[result])
    history: Any = [{"role": "user", "content": "How warm is it?"}, *first.output, result]
    by_items = client.responses.create(**ask, input=history, store=False)
    assert by_memory.output_text == by_items.output_text
    assert by_memory.usage is not None
    assert by_items.usage is not None
    assert (
        by_memory.usage.input_tokens == by_items.usage.input_tokens > ((first.usage and first.usage.input_tokens) or 0)
    )
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(**ask, input=[result])
    assert refused.value.param == "input"


def test_a_conversation_with_another_server_goes_on_here(client: openai.OpenAI) -> None:
    """With the tools and items that Codex sends."""
    items: list[Any] = [
        {"type": "additional_tools", "role": "developer", "tools": [TOOL, {"type": "web_search"}]},
        {"role": "user", "content": [{"type": "input_image", "image_url": "x"}, {"type": "input_text", "text": "?"}]},
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "a"}},
        {"type": "local_shell_call", "id": "lsh_1", "call_id": "c1", "status": "completed",
         "action": {"type": "exec", "command": ["ls"], "env": {}}},
        {"type": "local_shell_call_output", "id": "c1", "output": "a.txt"},
        {"role": "user", "content": "And the weather?"},
    ]  # fmt: skip
    answer = client.responses.with_raw_response.create(**COMMON, input=items, tool_choice="required")
    (call,) = answer.parse().output
    assert call.type == "function_call"
    assert call.name == TOOL["name"]
    jsonschema.validate(json.loads(call.arguments), WEATHER)
    left_out = ("tools[].type=web_search", "content[].type=input_image", "type=web_search_call")
    assert answer.headers["x-ryzanstein-ignored"] == ", ".join(f"input[].{name}" for name in left_out)


def test_a_conversation_is_kept_listed_and_deleted(client: openai.OpenAI, stack: RunningStack) -> None:
    ask = {**COMMON, "max_output_tokens": 16}
    first = client.responses.create(**ask, input="x = 1\n" * 20, metadata={"topic": "x"})
    second = client.responses.create(**ask, input="y = 2", previous_response_id=first.id)
    kept = client.responses.retrieve(first.id)
    assert kept.to_dict() == first.to_dict()
    assert second.previous_response_id == first.id
    (item,) = client.responses.input_items.list(second.id).data
    assert item.type == "message"
    assert second.usage is not None
    assert second.usage.input_tokens_details.cached_tokens > 0, "the turns of a conversation stay with a worker"
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    with pytest.raises(openai.BadRequestError) as lost:
        client.responses.create(**ask, input="z", previous_response_id=second.id)
    assert (lost.value.param, lost.value.code) == ("previous_response_id", "previous_response_not_found")
    assert httpx.get(f"{stack.url}/v1/responses/{second.id}/input_items?limit=1").json()["has_more"] is False


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "strict": True,
                              "schema": {"type": "array", "uniqueItems": True}}}}, "text.format.schema"),
        ({"max_output_tokens": 100_000}, "input"),
    ],
)  # fmt: skip
def test_unsupported_request_is_rejected_by_field(client: openai.OpenAI, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(**{"input": "hi", **COMMON, **fields})
    assert refused.value.param == param, refused.value
