"""One conversation, asked for by three APIs, is one chat; what is wrong with it is named as each API names it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
import pytest

from services.gateway.api.chat import ChatRequest
from services.gateway.api.decode import BodyDecoder
from services.gateway.api.ignored import Ignored
from services.gateway.api.schema import ChatBody
from services.gateway.errors import ApiError
from services.gateway.generation.chat_body import chat_of as of_completions
from services.gateway.generation.sampling import stop_strings
from services.gateway.grammar.formats import constraint_of
from services.gateway.http.messages.schema import MessagesBody
from services.gateway.http.messages.translation import sampled_chat_of
from services.gateway.http.responses.chat import chat_of as of_responses
from services.gateway.http.responses.reading import read_items
from services.gateway.http.responses.schema import ReferenceItem, ResponsesBody
from services.gateway.http.responses.tools import read_tools
from services.gateway.images.reader import without_images
from services.gateway.tools.formats import HERMES
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
    request = msgspec.convert(body | fields, ResponsesBody)
    items = [item for item in read_items(request.input, Ignored()) if not isinstance(item, ReferenceItem)]
    return of_responses(request, items, read_tools(request, items, len(items), Ignored()))


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
    constraint = constraint_of(chat.options, chat.names)
    assert constraint is not None
    assert constraint.checks.text is not None
    with pytest.raises(ApiError) as broken:  # while the text is written, when no endpoint is left to rename anything
        constraint.checks.text.hold('["a", "a"]')
    assert (broken.value.param, f"`{schema}`" in broken.value.message) == (schema, True)
    chat.options.stop = ["x"] * 17
    with pytest.raises(ApiError) as many:
        stop_strings(chat.options, chat.names.stop)
    assert (many.value.param, f"`{stop}`" in many.value.message) == (stop, True)


def test_the_older_functions_are_named_as_such() -> None:
    twice = [{"name": "f"}, {"name": "f"}]
    chat = completions(tools=None, functions=twice, function_call={"name": "f"})
    with pytest.raises(ApiError) as refused:
        tool_use(chat, HERMES, closed=True)
    assert refused.value.param == "functions"
    other = completions(tools=None, functions=twice[:1], function_call={"name": "g"})
    with pytest.raises(ApiError) as unknown:
        tool_use(other, HERMES, closed=True)
    assert unknown.value.param == "function_call"


ON = {"enable_thinking": True, "thinking": True}
OFF = {"enable_thinking": False, "thinking": False}


@pytest.mark.parametrize(
    ("fields", "variables"),
    [
        ({"enable_thinking": False}, OFF),
        ({"thinking": {"type": "enabled", "budget_tokens": 100}}, ON),
        ({"thinking": {"type": "disabled"}}, OFF),
        ({"thinking": {"type": "adaptive"}}, ON),
        ({"thinking": {"type": "auto"}, "enable_thinking": False}, OFF),
        ({"reasoning": {"enabled": False, "effort": "high"}}, OFF),
        ({"reasoning": {"enabled": False}, "thinking": {"type": "enabled"}}, ON),
        (
            {"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}},
            ON | {"enable_thinking": False},
        ),
        ({"thinking_budget": 5}, {}),
    ],
)
def test_thinking_is_switched_by_each_clients_field(fields: dict[str, Any], variables: dict[str, Any]) -> None:
    assert completions(**fields).variables == {"reasoning_effort": "low"} | variables


@pytest.mark.parametrize(
    ("given", "choice"),
    [
        *(({"type": word}, word) for word in ("auto", "none", "required")),
        ({"type": "any"}, "required"),
        ("any", "required"),
        ({"type": "function", "name": "f"}, "f"),
        ({"function": {"name": "f"}}, "f"),
        ({"type": "tool", "name": "f"}, "f"),
    ],
)
def test_a_tool_choice_may_be_an_object(given: Any, choice: str) -> None:
    assert completions(tool_choice=given).tools.choice == choice


def test_the_answer_goes_on_from_a_prefix() -> None:
    begun = {"role": "assistant", "content": "Once", "prefix": True}
    chat = completions(messages=[{"role": "user", "content": "Tell."}, begun])
    assert (chat.continue_final_message, chat.add_generation_prompt) == (True, False)
    assert completions(messages=[{"role": "assistant", "content": "Once", "partial": True}]).continue_final_message
    for messages in ([begun, {"role": "user", "content": "Go on."}], [begun | {"prefix": False}]):
        chat = completions(messages=messages)
        assert (chat.continue_final_message, chat.add_generation_prompt) == (False, True)


NOTE = "[The {} that stood here was left out: this model reads text only.]"
PICTURE: dict[str, Any] = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}


@pytest.mark.parametrize(
    ("parts", "texts", "left_out"),
    [
        (["a", {"type": "text", "text": "b"}], ["a", "b"], []),
        ([{"type": "text", "text": "a"}, PICTURE], ["a", NOTE.format("image")], ["image_url"]),
        (
            [{"type": "input_audio", "input_audio": {"data": "aGk=", "format": "wav"}}],
            [NOTE.format("audio")],
            ["input_audio"],
        ),
        ([{"type": "text", "text": None}, {"type": "refusal", "refusal": None}, {"text": "a"}], ["", "", "a"], []),
        (
            [{"type": "file", "file": {"file_id": "f"}}],
            ["[The file that stood here was left out: it cannot be read.]"],
            ["file"],
        ),
        ([{"type": "input_text", "text": "a"}, {"type": "output_text", "text": "b"}], ["a", "b"], []),
        ([{"type": "thinking", "thinking": "hm"}, {"type": "tool_use", "id": "c"}], ["", ""], ["thinking", "tool_use"]),
        ([{"type": "text", "text": 5}, {"type": "refusal"}, None], ["", "", ""], ["text", "refusal", "null"]),
    ],
)
def test_parts_of_a_history_are_read_or_left_out(parts: list[Any], texts: list[str], left_out: list[str]) -> None:
    for role in ("user", "assistant", "tool"):
        given = json.dumps({"messages": [{"role": role, "content": parts}, {"role": "assistant", "content": "ho"}]})
        ignored = Ignored()
        chat = of_completions(asyncio.run(BodyDecoder(ChatBody).decode(given.encode(), ignored)), 100, ignored)
        assert without_images(chat.turns, ignored)[0].parts == texts
        assert list(ignored.names) == [f"messages[].content[].type={kind}" for kind in left_out]


@pytest.mark.parametrize(
    ("content", "kind", "result"),
    [
        (5, "number", "5"),
        (1.5, "number", "1.5"),
        (False, "boolean", "false"),
        ({"a": 1}, "object", '{"a":1}'),
        ([["a"]], "array", '["a"]'),
    ],
)
def test_a_bare_value_is_left_out_of_a_history_json_as_a_result_and_refused_as_new(
    content: Any, kind: str, result: str
) -> None:
    for role, text, left_out in (
        ("user", "", [f"messages[].content[].type={kind}"]),
        ("tool", result, []),
    ):
        ignored = Ignored()
        messages = [{"role": role, "content": content}, {"role": "user", "content": "hi"}]
        given = json.dumps({"messages": messages}).encode()
        body = asyncio.run(BodyDecoder(ChatBody).decode(given, ignored))
        assert of_completions(body, 100, ignored).turns[0].parts == [text]
        assert list(ignored.names) == left_out
    given = json.dumps({"messages": [{"role": "user", "content": content}]}).encode()
    body = asyncio.run(BodyDecoder(ChatBody).decode(given, Ignored()))
    with pytest.raises(ApiError, match=r"got `|[Mm]issing") as refused:
        of_completions(body, 100, Ignored())
    assert refused.value.param == f"messages[0].content{'[0]' if isinstance(content, list) else ''}"


@pytest.mark.parametrize(
    ("message", "read", "left_out"),
    [
        ({"content": "a", "name": 5}, "a", ["name"]),
        ({"content": "a", "tool_calls": "f"}, "a", ["tool_calls"]),
        ({"content": "a", "reasoning_content": ["b"], "reasoning_details": [1, {"text": "c"}]}, "a",
         ["reasoning_content", "reasoning_details[]"]),
        ({"content": "a", "tool_calls": [5, {"id": "1"}, {"function": {"name": "f"}}, {"function": {"name": 1}}]}, "a",
         ["tool_calls[]"]),
        ({"content": "a", "function_call": {"arguments": "{}"}}, "a", ["function_call"]),
        ({"role": 5, "content": "a"}, None, ["role", ""]),
        ({"role": None, "content": "a"}, None, ["role", ""]),
    ],
)  # fmt: skip
def test_malformed_fields_of_a_history_are_left_out_and_refused_as_new(
    message: dict[str, Any], read: str | None, left_out: list[str]
) -> None:
    given = {"role": "assistant"} | message
    newest = {"role": "user", "content": "hi"}
    ignored = Ignored()
    body = json.dumps({"messages": [given, newest]}).encode()
    turns = of_completions(asyncio.run(BodyDecoder(ChatBody).decode(body, ignored)), 100, ignored).turns
    assert [turn.parts for turn in turns] == ([] if read is None else [[read]]) + [["hi"]]
    assert [call.name for call in turns[0].calls] == (["f"] if "tool_calls[]" in left_out else [])
    assert set(ignored.names) == {f"messages[].{name}".removesuffix(".") for name in left_out}
    body = json.dumps({"messages": [newest, given]}).encode()
    with pytest.raises(ApiError, match="messages"):
        of_completions(asyncio.run(BodyDecoder(ChatBody).decode(body, Ignored())), 100, Ignored())


@pytest.mark.parametrize(
    ("role", "part", "reason"),
    [
        ("user", PICTURE, "models here read text only"),
        ("system", PICTURE, "models here read text only"),
        ("user", {"type": "video_url", "video_url": {"url": "https://a.b/c.mp4"}}, "texts and images, and no video"),
        ("user", {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}, "and images, and no audio"),
    ],
)
def test_new_media_are_refused(role: str, part: dict[str, Any], reason: str) -> None:
    given = json.dumps({"messages": [{"role": "assistant", "content": "ho"}, {"role": role, "content": [part]}]})
    body = asyncio.run(BodyDecoder(ChatBody).decode(given.encode(), Ignored()))
    with pytest.raises(ApiError, match=reason) as refused:
        without_images(of_completions(body, 100, Ignored()).turns, Ignored())
    assert refused.value.param == "messages[1].content[0].type"


def test_calls_of_a_history_are_read_in_each_clients_form() -> None:
    calls: list[dict[str, Any]] = [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}, "extra_content": {"g": {}}},
        {"id": "2", "type": "builtin_function", "function": {"name": "$web_search", "arguments": ""}},
        {"id": "3", "type": "mcp", "mcp": {}},
        {"id": "4", "type": "function", "function": {"name": "g", "arguments": []}},
        {"id": "5", "type": "function", "function": {"name": "g", "arguments": [1]}},
        {"id": "6", "type": "custom", "custom": {"name": "h"}},
        {"id": "7", "type": "custom", "custom": {"name": "h", "input": {"a": 1}}},
    ]
    given = {"messages": [{"role": "assistant", "tool_calls": calls, "audio": {"id": "a"}, "extra_content": {}}]}
    ignored = Ignored()
    body = asyncio.run(BodyDecoder(ChatBody).decode(json.dumps(given).encode(), ignored))
    made = of_completions(body, 100, ignored).turns[0].calls
    assert [(call.name, call.arguments) for call in made] == [
        ("f", '{"a":1}'), ("$web_search", "{}"), ("g", "{}"), ("g", "[1]"), ("h", '{"input":""}'),
        ("h", '{"input":"{\\"a\\":1}"}'),
    ]  # fmt: skip
    assert list(ignored.names) == [
        "messages[].tool_calls[].mcp", "messages[].audio", "messages[].tool_calls[].type=mcp",
    ]  # fmt: skip


def test_a_message_of_another_role_is_left_out_of_a_history_and_refused_as_the_last() -> None:
    newest = {"role": "user", "content": "hi"}
    for role in ("model", "ipython", "latest_reminder"):
        ignored, other = Ignored(), {"role": role, "content": [PICTURE]}
        body = msgspec.convert({"messages": [newest, {"role": role, "content": "a"}, newest]}, ChatBody)
        assert [turn.role for turn in of_completions(body, 100, ignored).turns] == ["user", "user"]
        assert list(ignored.names) == [f"messages[].role={role}"]
        given = json.dumps({"messages": [newest, other]}).encode()
        body = asyncio.run(BodyDecoder(ChatBody).decode(given, Ignored()))
        with pytest.raises(ApiError, match="is none of `assistant`") as refused:
            of_completions(body, 100, Ignored())
        assert refused.value.param == "messages[1].role"


def test_hosted_tools_are_left_out() -> None:
    ignored = Ignored()
    tools = [{"type": "web_search_preview"}, {"type": "function", "function": {"name": "f"}}]
    body = msgspec.convert({"messages": [{"role": "user", "content": "hi"}], "tools": tools}, ChatBody)
    assert [function.name for function in of_completions(body, 100, ignored).tools.functions] == ["f"]
    assert list(ignored.names) == ["tools[].type=web_search_preview"]
    offered = [{"type": "mcp", "server_label": "a"}, {"type": "function", "function": {"name": "f"}}]
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": offered}}
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": tools, "tool_choice": allowed}
    decoded = asyncio.run(BodyDecoder(ChatBody).decode(json.dumps(body).encode(), Ignored()))
    actual = of_completions(decoded, 100, Ignored()).tools
    assert ([function.name for function in actual.functions], actual.choice) == (["f"], "required")
    with pytest.raises(ApiError) as missing:
        completions(tools=[{"type": "function"}])
    assert missing.value.param == "tools[0].function"


@pytest.mark.parametrize("kind", ["json_object", "json_schema", "json"])
def test_a_schema_may_stand_beside_the_formats_type(kind: str) -> None:
    chat = completions(response_format={"type": kind, "schema": ARRAY, "name": "x"})
    constraint = constraint_of(chat.options, chat.names)
    assert constraint is not None
    assert (constraint.field, constraint.checks.text is not None) == ("response_format.schema", True)
    assert '"items"' in constraint.grammar


def test_a_schema_in_the_place_of_a_named_schema_is_rejected() -> None:
    named = {"type": "json_schema", "json_schema": {"name": "x", "schema": ARRAY, "zeta": 1}}
    data, ignored = {"messages": [{"role": "user", "content": "a"}], "response_format": named}, Ignored()
    asyncio.run(BodyDecoder(ChatBody).decode(json.dumps(data).encode(), ignored))
    assert list(ignored.names) == ["response_format.json_schema.zeta"]
    given = {"messages": [{"role": "user", "content": "a"}]}
    given |= {"response_format": {"type": "json_schema", "json_schema": PARAMETERS}}
    with pytest.raises(ApiError, match=r"Unknown field `response_format\.json_schema\.type`"):
        asyncio.run(BodyDecoder(ChatBody).decode(json.dumps(given).encode(), Ignored()))
