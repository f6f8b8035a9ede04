"""One conversation, asked for by three APIs, is one chat; what is wrong with it is named as each API names it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from services.gateway.api.chat import ChatRequest
from services.gateway.api.ignored import Ignored
from services.gateway.api.schema import ChatBody
from services.gateway.errors import ApiError
from services.gateway.generation.chat_body import chat_of as of_completions
from services.gateway.generation.sampling import stop_strings
from services.gateway.grammar.formats import asked_for
from services.gateway.http.messages.schema import MessagesBody
from services.gateway.http.messages.translation import sampled_chat_of
from services.gateway.http.responses.chat import chat_of as of_responses
from services.gateway.http.responses.reading import read_items
from services.gateway.http.responses.schema import ReferenceItem, ResponsesBody
from services.gateway.http.responses.tools import read_tools
from services.gateway.tools.hermes import HermesParser
from services.gateway.tools.use import tool_use

ARRAY: dict[str, Any] = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}
PARAMETERS: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}
SAMPLING: dict[str, Any] = {"temperature": 0.5, "top_p": 0.9, "top_k": 3, "seed": 7}


def completions(**fields: Any) -> ChatRequest:
    call = {"id": "c1", "function": {"name": "f", "arguments": '{"a":1}'}}
    body = {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "hi"}, {"type": "text", "text": "you"}]},
            {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "name": "f", "content": "no"},
        ],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": PARAMETERS}}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": ARRAY}},
        "reasoning_effort": "low",
        "max_completion_tokens": 5,
        **SAMPLING,
    }
    return of_completions(msgspec.convert(body | fields, ChatBody), 100, Ignored())


def responses(**fields: Any) -> ChatRequest:
    body = {
        "instructions": "Be brief.",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "hi"}, {"type": "input_text", "text": "you"}]},
            {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a":1}'},
            {"type": "function_call_output", "call_id": "c1", "output": "no"},
        ],
        "tools": [{"type": "function", "name": "f", "parameters": PARAMETERS}],
        "text": {"format": {"type": "json_schema", "name": "x", "schema": ARRAY}},
        "reasoning": {"effort": "low"},
        "max_output_tokens": 5,
        **SAMPLING,
    }
    asked = msgspec.convert(body | fields, ResponsesBody)
    items = [item for item in read_items(asked.input, Ignored()) if not isinstance(item, ReferenceItem)]
    return of_responses(asked, items, read_tools(asked, Ignored()))


def messages(**fields: Any) -> ChatRequest:
    body = {
        "system": "Be brief.",
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "hi"}, {"type": "text", "text": "you"}]},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "hm"}, {"type": "text", "text": ""},
                {"type": "tool_use", "id": "c1", "name": "f", "input": {"a": 1}},
            ]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "no"}]},
        ],
        "tools": [{"name": "f", "input_schema": PARAMETERS}],
        "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": ARRAY}},
        "max_tokens": 5,
        **SAMPLING,
    }  # fmt: skip
    return sampled_chat_of(msgspec.convert(body | fields, MessagesBody), Ignored())


def test_one_conversation_is_one_chat() -> None:
    chats = [completions(), responses(), messages()]
    for part in ("turns", "variables", "max_tokens", "add_generation_prompt", "continue_final_message"):
        first, *others = [getattr(chat, part) for chat in chats]
        assert others == [first, first], part
    for name in SAMPLING:
        assert {getattr(chat.options, name) for chat in chats} == {SAMPLING[name]}
    assert [[function.parameters for function in chat.tools.functions] for chat in chats] == [[PARAMETERS]] * 3


NAMED = [
    (completions(), "messages", "response_format.json_schema.schema", "stop"),
    (responses(), "input", "text.format.schema", "stop"),
    (messages(), "messages", "output_config.format.schema", "stop_sequences"),
    (messages(output_config=None, output_format={"type": "json_schema", "schema": ARRAY}),
     "messages", "output_format.schema", "stop_sequences"),
]  # fmt: skip


@pytest.mark.parametrize(("chat", "conversation", "schema", "stop"), NAMED)
def test_errors_name_the_fields_of_the_api(chat: ChatRequest, conversation: str, schema: str, stop: str) -> None:
    assert chat.names.messages == conversation
    asked = asked_for(chat.options, chat.names)
    assert asked is not None
    assert asked.checks.text is not None
    with pytest.raises(ApiError) as broken:  # while the text is written, when no endpoint is left to rename anything
        asked.checks.text.hold('["a", "a"]')
    assert (broken.value.param, f"`{schema}`" in broken.value.message) == (schema, True)
    chat.options.stop = ["x"] * 9
    with pytest.raises(ApiError) as many:
        stop_strings(chat.options, 4, chat.names.stop)
    assert (many.value.param, f"`{stop}`" in many.value.message) == (stop, True)


def test_the_older_functions_are_named_as_such() -> None:
    twice = [{"name": "f"}, {"name": "f"}]
    chat = completions(tools=None, functions=twice, function_call={"name": "f"})
    with pytest.raises(ApiError) as refused:
        tool_use(chat, HermesParser, closed=True)
    assert refused.value.param == "functions"
    other = completions(tools=None, functions=twice[:1], function_call={"name": "g"})
    with pytest.raises(ApiError) as unknown:
        tool_use(other, HermesParser, closed=True)
    assert unknown.value.param == "function_call"
