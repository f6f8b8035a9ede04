"""Fields that change nothing are accepted, whatever else is not supported is refused by name, in every body."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from msgspec import inspect

from services.gateway.api.fields import advisory_fields, neutral_values
from services.gateway.api.ignored import IGNORED_HEADER, Ignored, leave_out
from services.gateway.api.schema import (
    BatchBody,
    ChatBody,
    CompletionBody,
    EmbeddingBody,
    FineTuningBody,
    RerankBody,
    ScoreBody,
    StreamOptions,
)
from services.gateway.http.messages.endpoint import NO_THREADS
from services.gateway.http.messages.schema import CountBody, MessagesBody
from services.gateway.http.responses.compaction import CompactBody
from services.gateway.http.responses.counting import InputTokensBody
from services.gateway.http.responses.schema import ResponsesBody
from services.gateway.http.tokens import DetokenizeBody, TokenizeBody
from tests.integration.gateway.fleet import MODEL, Worker
from tests.integration.gateway.gateways import GatewayStack, running_stack
from tests.unit.gateway.made_tokenizers import byte_level

HELLO = {"role": "user", "content": "hi"}
CHAT = "/v1/chat/completions"
BODIES: dict[str, tuple[type[msgspec.Struct], dict[str, Any]]] = {
    CHAT: (ChatBody, {"messages": [HELLO], "max_tokens": 1}),
    "/v1/messages": (MessagesBody, {"messages": [HELLO], "max_tokens": 1}),
    "/v1/messages/count_tokens": (CountBody, {"messages": [HELLO]}),
    "/v1/responses": (ResponsesBody, {"input": "a", "max_output_tokens": 1, "store": False}),
    "/v1/responses/input_tokens": (InputTokensBody, {"input": "a"}),
    "/v1/responses/compact": (CompactBody, {"model": MODEL, "input": "a", "max_output_tokens": 1}),
    "/v1/completions": (CompletionBody, {"prompt": "a", "max_tokens": 1}),
    "/v1/embeddings": (EmbeddingBody, {"input": "a"}),
    "/v1/score": (ScoreBody, {"text_1": "a", "text_2": ["a"]}),
    "/v1/rerank": (RerankBody, {"query": "a", "documents": ["a"]}),
    "/tokenize": (TokenizeBody, {"prompt": "a"}),
    "/detokenize": (DetokenizeBody, {"tokens": [5]}),
}


@pytest.fixture
async def stack() -> AsyncIterator[GatewayStack]:
    template = "{{ reasoning_effort }}{% for m in messages %}{{ m.reasoning_content }}{{ m.content }}{% endfor %}"
    async with running_stack([Worker("w0", template=template)]) as running:
        yield running


async def test_null_is_the_default_of_every_field(stack: GatewayStack) -> None:
    for path, (kind, needed) in BODIES.items():
        fields = [field for field in kind.__struct_encode_fields__ if field not in needed]
        answers = await asyncio.gather(*(stack.http.post(path, json=needed | {field: None}) for field in fields))
        for field, answer in zip(fields, answers, strict=True):
            assert answer.status_code == 200, (path, field, answer.text)
    nothing = dict.fromkeys(StreamOptions.__struct_fields__)
    answer = await stack.complete(prompt="a", stream=True, stream_options=nothing)
    assert answer.status_code == 200
    assert b'"usage"' not in answer.content


async def test_unsupported_field_is_accepted_when_neutral_and_else_rejected_by_name(stack: GatewayStack) -> None:
    for path, (kind, needed) in BODIES.items():
        for field, values in neutral_values(kind).items():
            answers = await asyncio.gather(*(stack.http.post(path, json=needed | {field: value}) for value in values))
            for value, answer in zip(values, answers, strict=True):
                assert answer.status_code == 200, (path, field, value, answer.text)
            answer = await stack.http.post(path, json=needed | {field: {"type": "other"}})
            error = answer.json()["error"]
            error |= {"code": details["error_code"], **details} if (details := error.get("details")) else {}
            code = NO_THREADS if field == "thread" else "unsupported_field"
            assert (answer.status_code, error["param"], error["code"]) == (400, field, code)
    other = await stack.http.post(CHAT, json={"messages": [HELLO], "documents": [{"text": "a"}]})
    assert other.json()["error"]["message"] == "`documents` is not supported; only `[]` or `null` is accepted."


def _structs(described: inspect.Type, actual: dict[type[msgspec.Struct], inspect.StructType]) -> None:
    """All structs that a body may hold."""
    if isinstance(described, inspect.StructType) and described.cls not in actual:
        actual[described.cls] = described
        for field in described.fields:
            _structs(field.type, actual)
    for part in (
        *getattr(described, "types", ()),
        *(getattr(described, name, None) for name in ("type", "item_type", "value_type")),
    ):
        if isinstance(part, inspect.Type):
            _structs(part, actual)


def _takes_null(described: inspect.Type) -> bool:
    if isinstance(described, inspect.Metadata):
        return _takes_null(described.type)
    parts = described.types if isinstance(described, inspect.UnionType) else (described,)
    return any(
        isinstance(part, inspect.NoneType | inspect.AnyType) or (part is not described and _takes_null(part))
        for part in parts
    )


def test_null_means_the_default_of_optional_nested_fields() -> None:
    actual: dict[type[msgspec.Struct], inspect.StructType] = {}
    for kind in (*(kind for kind, _ in BODIES.values()), BatchBody, FineTuningBody):
        _structs(inspect.type_info(kind), actual)
    assert len(actual) > 2 * len(BODIES)
    refused = [
        f"{kind.__name__}.{field.encode_name}"
        for kind, described in actual.items()
        for field in described.fields
        if not field.required and not _takes_null(field.type)
    ]
    assert refused == []


def test_advisory_fields_take_any_value() -> None:
    actual: dict[type[msgspec.Struct], inspect.StructType] = {}
    for kind in (*(kind for kind, _ in BODIES.values()), BatchBody, FineTuningBody):
        _structs(inspect.type_info(kind), actual)
    values = ("a", 1, 1.5, True, [1], {"a": 1}, None)
    tried = 0
    for kind in actual:
        types = {one.encode_name: one.type for one in actual[kind].fields}
        for field in advisory_fields(kind):
            tried += 1
            assert isinstance(types[field], inspect.Metadata)
            assert isinstance(types[field].type, inspect.AnyType), f"{kind.__name__}.{field} refuses some of {values}"
    assert tried > 60


def test_unknown_fields_of_every_object_in_a_body_are_left_out() -> None:
    tried = 0
    for kind in (*(kind for kind, _ in BODIES.values()), BatchBody, FineTuningBody):
        for field in inspect.type_info(kind).fields:  # type: ignore[attr-defined]
            kinds = list(alternatives(field.type))
            items = [one for kind in kinds for one in alternatives(getattr(kind, "item_type", None)) if one]
            for parts, value, path in ((kinds, {"zeta": 1}, ""), (items, [{"zeta": 1}], "[]")):
                if any(isinstance(part, inspect.StructType) and part.tag is None for part in parts):
                    ignored, name = Ignored(), field.encode_name
                    assert leave_out({name: value}, kind, ignored) == {name: [{}] if path else {}}
                    assert list(ignored.names) == [f"{name}{path}.zeta"]
                    tried += 1
    assert tried > 20


def alternatives(described: Any) -> list[Any]:
    if isinstance(described, inspect.Metadata):
        return alternatives(described.type)
    if isinstance(described, inspect.UnionType):
        return [alternative for one in described.types for alternative in alternatives(one)]
    return [described]


async def test_fields_that_advise_are_accepted(stack: GatewayStack) -> None:
    advice = {
        "safety_identifier": "s", "prompt_cache_key": "k", "prompt_cache_retention": "24h", "service_tier": "auto",
        "store": True, "metadata": {"a": "b"}, "parallel_tool_calls": False, "verbosity": "low",
        "stream_options": {"include_obfuscation": False},
    }  # fmt: skip
    part = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}
    messages = [
        {"role": "user", "content": [part]},
        {"role": "assistant", "content": "ho", "refusal": None, "annotations": [], "audio": None, "tool_calls": None,
         "function_call": None, "reasoning_content": None},
        {"role": "assistant", "content": None, "tool_calls": [], "annotations": [{"type": "url_citation"}]},
        {"role": "assistant", "provider_specific_fields": {"a": 1}, "tool_calls": [
            {"id": "c", "type": None, "provider_specific_fields": None, "function": {"name": "f", "arguments": None}}]},
        {"role": "tool", "tool_call_id": "c", "content": "1"},
        HELLO,
    ]  # fmt: skip
    tool = {"type": None, "cache_control": {"type": "ephemeral"}, "function": {"name": "f"}}
    advice |= {"tools": [tool], "tool_choice": "none", "logprobs": False, "top_logprobs": 0}
    advice |= {"client_metadata": {"a": "b"}, "web_search_options": {}, "reasoning": {"max_tokens": 9, "exclude": True}}
    answer = await stack.http.post(CHAT, json={"messages": messages, "max_tokens": 1, **advice})
    assert answer.status_code == 200, answer.text
    assert answer.headers[IGNORED_HEADER] == "web_search_options"


async def test_a_missing_nested_field_is_named(stack: GatewayStack) -> None:
    answer = await stack.http.post(CHAT, json={"messages": [HELLO | {"tool_calls": [{"id": "x"}]}]})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages[0].tool_calls[0].function")
    assert "Missing" in answer.json()["error"]["message"]


async def test_unknown_fields_are_left_out_and_named_in_every_body(stack: GatewayStack) -> None:
    for path, (_, needed) in BODIES.items():
        answer = await stack.http.post(path, json=needed | {"zeta": {"a": [1]}, "alpha": None})
        assert answer.status_code == 200, (path, answer.text)
        assert answer.headers[IGNORED_HEADER] == "zeta, alpha"
        assert IGNORED_HEADER not in (await stack.http.post(path, json=needed)).headers


async def test_unknown_nested_fields_are_named_without_their_index(stack: GatewayStack) -> None:
    call = {"id": "c", "index": 0, "function": {"name": "f", "arguments": "{}", "thought": 1}}
    messages = [HELLO | {"a": 1}, {"role": "assistant", "tool_calls": [call], "a": 2}, HELLO | {"b": 3}]
    body = {"messages": messages, "stream": True, "stream_options": {"include_usage": True, "c": 4}, "max_tokens": 1}
    answer = await stack.http.post(CHAT, json=body)
    assert answer.status_code == 200, answer.text
    names = "messages[].a, messages[].tool_calls[].function.thought, messages[].b, stream_options.c"
    assert answer.headers[IGNORED_HEADER] == names
    tool = {"name": "f", "input_schema": {"type": "object", "x": 1}, "examples": []}
    answer = await stack.http.post("/v1/messages", json={"messages": [HELLO], "max_tokens": 1, "tools": [tool]})
    assert answer.headers[IGNORED_HEADER] == "tools[].examples"
    items = [{"role": "user", "content": [{"type": "input_text", "text": "a", "tone": "b"}], "mood": 1}]
    answer = await stack.http.post("/v1/responses/input_tokens", json={"input": items})
    assert answer.headers[IGNORED_HEADER] == "input[].content[].tone, input[].mood"


async def test_a_header_of_unknown_fields_is_short_and_printable(stack: GatewayStack) -> None:
    fields = {"line\r\nx-evil: 1": 1, "日本, a": 2, "n" * 5000: 3, **{f"field_{number}": 1 for number in range(300)}}
    needed = {"prompt": "a", "max_tokens": 1}
    for body in (needed | fields, needed | fields | {"large": "x" * 200_000}):
        answer = await stack.http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        assert "x-evil" not in answer.headers
        named = answer.headers[IGNORED_HEADER]
        assert named.startswith("line??x-evil:?1, ????a, nnn")
        assert named.endswith(", ...")
        assert len(named) < 4096
    answer = await stack.http.post("/v1/completions", json={"zeta": 1, "temperature": -1, "prompt": "a"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "temperature")


async def test_unknown_fields_are_refused_by_name_where_the_setting_says_so() -> None:
    async with running_stack([Worker("w0")], unknown_fields="refuse") as strict:
        for path, (_, needed) in BODIES.items():
            answer = await strict.http.post(path, json=needed | {"nonsense": 1})
            error = answer.json()["error"]
            assert answer.status_code == 400, path
            assert error["message"].startswith("Unknown field `nonsense`.")
        large = {"prompt": "a" * 100_000, "nonsense": 1}
        assert (await strict.http.post("/v1/completions", json=large)).json()["error"]["param"] == "nonsense"
        answer = await strict.http.post(CHAT, json={"messages": [HELLO | {"nonsense": 1}]})
        assert answer.json()["error"]["param"] == "messages[0].nonsense"
        items = [{"role": "user", "content": "a", "nonsense": 1}]
        answer = await strict.http.post("/v1/responses/input_tokens", json={"input": items})
        assert answer.json()["error"]["param"] == "input[0].nonsense"


async def test_templates_hear_of_reasoning(stack: GatewayStack) -> None:
    messages = [{"role": "assistant", "content": "b", "reasoning_content": "a"}, HELLO]
    await stack.http.post(CHAT, json={"messages": messages, "reasoning_effort": "low", "max_tokens": 1})
    assert byte_level().decode(list(stack.workers[0].submits[-1].prompt_ids)) == "lowabhi"
