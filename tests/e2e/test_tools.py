"""Tools with the official client against the real system: choices, streams, limits, schemas."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest

from tests.stack import RunningStack

MODEL = "ryzanstein-tiny"
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 16}, "unit": {"$ref": "#/$defs/unit"}},
    "required": ["city", "unit"],
    "additionalProperties": False,
    "$defs": {"unit": {"enum": ["C", "F"]}},
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "get_weather", "description": "Of a city", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now"}},
]
ASK: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "How warm is it?"}]
COMMON: dict[str, Any] = {"model": MODEL, "messages": ASK, "max_tokens": 400, "seed": 4}
NO_ANSWER = {"properties": {"a": {"not": {}}}, "required": ["a"]}  # which no grammar says
UNSUPPORTED: Any = [{"type": "function", "function": {"name": "f", "parameters": NO_ANSWER, "strict": True}}]


@pytest.fixture(scope="module")
def client(stack: RunningStack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="unused", max_retries=0, timeout=60) as client:
        yield client


def check(name: str, arguments: str) -> None:
    assert name in ("get_weather", "now")
    value = json.loads(arguments)
    jsonschema.validate(value, WEATHER if name == "get_weather" else {"type": "object"})


def test_arguments_have_only_the_named_properties(client: openai.OpenAI) -> None:
    lax = {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]}
    for parameters, actual in ((None, [{}]), ({}, [{}]), (lax, [{"on": False}, {"on": True}])):
        function = {"name": "f"} if parameters is None else {"name": "f", "parameters": parameters}
        tools: Any = [{"type": "function", "function": function}]
        for choice in ("required", {"type": "function", "function": {"name": "f"}}):
            for seed in range(3):
                ask = {**COMMON, "tools": tools, "tool_choice": choice, "parallel_tool_calls": False, "seed": seed}
                (call,) = client.chat.completions.create(**ask, temperature=1.5).choices[0].message.tool_calls or []
                assert json.loads(call.function.arguments) in actual


def test_calls_that_violate_an_unenforced_schema_are_an_error(client: openai.OpenAI) -> None:
    checked = [{"type": "function", "function": {**UNSUPPORTED[0]["function"], "strict": False}}]
    ask = {**COMMON, "tools": checked, "tool_choice": "required", "parallel_tool_calls": False}
    with pytest.raises(openai.BadRequestError, match="`parameters` of `f`") as refused:
        client.chat.completions.create(**ask)
    assert (refused.value.param, refused.value.code) == ("tools", "schema_failed")
    with pytest.raises(openai.APIError, match="`parameters` of `f`"):
        list(client.chat.completions.create(**ask, stream=True))


def test_several_choices_and_older_functions(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**COMMON, n=3, tools=TOOLS, tool_choice="required", temperature=1.2)
    calls = [call for choice in answer.choices for call in choice.message.tool_calls or []]
    assert len(calls) >= 2
    assert len({call.id for call in calls}) == len(calls)
    functions = [TOOLS[0]["function"]]
    older = client.chat.completions.create(**COMMON, functions=functions, function_call={"name": "get_weather"})
    assert older.choices[0].finish_reason == "function_call"
    called = older.choices[0].message.function_call
    assert called
    check(called.name, called.arguments)
    client.chat.completions.create(
        **{**COMMON, "messages": [*ASK, older.choices[0].message, {"role": "function", "name": "x", "content": "1"}]}
    )


def test_no_choice_no_call_and_strict_tools_beside_text(client: openai.OpenAI) -> None:
    plain = client.chat.completions.create(**COMMON).choices[0].message
    assert client.chat.completions.create(**COMMON, tools=TOOLS, tool_choice="none").choices[0].message == plain
    assert client.chat.completions.create(**COMMON, tools=[]).choices[0].message == plain
    strict = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]
    pushed = [*ASK, {"role": "assistant", "content": "<tool_call>\n"}]
    ask = {**COMMON, "messages": pushed, "tools": strict}
    client.chat.completions.create(**ask)
    answer_format: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "boolean"}}}
    message = client.chat.completions.create(**COMMON, tools=strict, response_format=answer_format).choices[0].message
    for call in message.tool_calls or []:
        check(call.function.name, call.function.arguments)
    assert message.tool_calls or isinstance(json.loads(message.content or ""), bool)
