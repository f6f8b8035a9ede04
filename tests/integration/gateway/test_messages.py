"""Anthropic's Messages API by its own client: prompts, events, reasons to stop, failures, wrong input."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import pytest
from ryzanstein.v1 import worker_pb2

from tests.integration.gateway.fleet import CHAT_TEMPLATE, MAX_LEN, MODEL, Fault, Worker
from tests.integration.gateway.gateways import GatewayStack, running_stack
from tests.unit.gateway.made_tokenizers import byte_level

MESSAGES = "/v1/messages"
HELLO: Any = {"role": "user", "content": "hi"}
ASK: Any = {"model": MODEL, "messages": [HELLO], "max_tokens": 6}
SEEDED: Any = {**ASK, "extra_body": {"seed": 1}}
TOOL = {"name": "f", "description": "d", "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}
# Shows all that a template is given, so that two prompts are equal only if all of it is.
TELLING = (
    "{{ tools[0].function.name }}{{ tools[0].function.parameters }}{{ reasoning_effort }}{{ enable_thinking }}"
    "{% for m in messages %}{{ m.role[0] }}{{ m.content }}{{ m.reasoning_content }}{{ m.tool_calls }}"
    "{{ m.tool_call_id }}{{ m.name }};{% endfor %}"
)


def writes(text: str, **fields: Any) -> Worker:
    """A worker whose answer is this text."""
    ids = byte_level().encode(text).ids
    return Worker("w0", token=lambda prompt, seed, position: ids[position], end_at=len(ids), **fields)


@asynccontextmanager
async def served(*workers: Worker, **settings: Any) -> AsyncIterator[tuple[GatewayStack, anthropic.AsyncAnthropic]]:
    async with (
        running_stack(workers or [Worker("w0")], **settings) as stack,
        anthropic.AsyncAnthropic(base_url=stack.url, api_key="secret", max_retries=0, timeout=120) as client,
    ):
        yield stack, client


async def test_template_gets_the_same_values_from_messages_as_from_a_chat() -> None:
    call = {"type": "tool_use", "id": "c1", "name": "f", "input": {"a": 1}}
    sent: Any = {
        **ASK,
        "max_tokens": 1,
        "system": [
            {"type": "text", "text": "s1", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "s2"},
        ],
        "messages": [
            HELLO,
            {"role": "user", "content": [{"type": "text", "text": "you"}]},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "hm", "signature": "x"}, {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "wait"}, call,
            ]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": "no", "is_error": True},
                {"type": "text", "text": "so?"},
            ]},
        ],
        "tools": [TOOL],
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "output_config": {"effort": "low"},
    }  # fmt: skip
    made = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
    chat = {
        "messages": [
            {"role": "system", "content": "s1\ns2"},
            {"role": "user", "content": "hi\nyou"},
            {"role": "assistant", "content": "wait", "reasoning_content": "hm", "tool_calls": [made]},
            {"role": "tool", "content": "Error: no", "tool_call_id": "c1", "name": "f"},
            {"role": "user", "content": "so?"},
        ],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": TOOL["input_schema"]}}],
        "chat_template_kwargs": {"enable_thinking": True},
        "reasoning_effort": "low",
        "max_tokens": 1,
    }  # fmt: skip
    async with served(Worker("w0", template=TELLING)) as (stack, client):
        stack.workers[0].token = lambda prompt, seed, position: 5
        answer = await stack.http.post("/v1/chat/completions", json=chat)
        assert answer.status_code == 200, answer.text
        message = await client.messages.create(**sent, metadata={"user_id": "u"})
        first, second = stack.workers[0].submits
        assert list(first.prompt_ids) == list(second.prompt_ids), byte_level().decode(list(second.prompt_ids))
        assert message.usage.input_tokens == len(second.prompt_ids)
        del sent["max_tokens"]
        assert (await client.messages.count_tokens(**sent)).input_tokens == len(second.prompt_ids)
        assert stack.router.routes[-1].session == "u"


THINKING = "<think>first\nthen</think>\n\nHello you.\n"
CALLS = "".join(
    f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>\n' for arguments in ('{"a": 1}', "{}")
)


def shape(events: Sequence[Any]) -> list[str]:
    """Kinds of events and deltas in their order, repetitions left out."""
    names = [event["delta"]["type"] if event["type"] == "content_block_delta" else event["type"] for event in events]
    return [name for position, name in enumerate(names) if position == 0 or names[position - 1] != name]


async def raw_events(stack: GatewayStack, **body: Any) -> list[Any]:
    answer = await stack.http.post(MESSAGES, json=body | {"stream": True})
    assert answer.status_code == 200, answer.text
    events = []
    for frame in answer.text.strip().split("\n\n"):
        name, data = frame.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


async def test_events_of_thinking_text_and_calls() -> None:
    template = CHAT_TEMPLATE + "{# <think> <tool_call> #}{% if tools %}{% endif %}"
    async with served(writes(THINKING + CALLS, template=template)) as (stack, client):
        ask = {**ASK, "max_tokens": 200, "tools": [TOOL]}
        events = await raw_events(stack, **ask)
        assert shape(events) == [
            "message_start",
            "content_block_start", "ping", "thinking_delta", "signature_delta", "content_block_stop",
            "content_block_start", "text_delta", "content_block_stop",
            "content_block_start", "input_json_delta", "content_block_stop",
            "content_block_start", "input_json_delta", "content_block_stop",
            "message_delta", "message_stop",
        ]  # fmt: skip
        whole = await client.messages.create(**ask)
        thought, text, call, other = whole.content
        assert (thought.thinking, text.text) == ("first\nthen", "Hello you.")
        assert (call.name, call.input, other.input, whole.stop_reason) == ("f", {"a": 1}, {}, "tool_use")
        assert call.id != other.id
        async with client.messages.stream(**ask) as stream:
            final = await stream.get_final_message()
        hidden: Any = {"id"}
        assert [b.model_dump(exclude=hidden) for b in final.content] == [
            b.model_dump(exclude=hidden) for b in whole.content
        ]
        assert (final.stop_reason, final.usage) == ("tool_use", whole.usage)
        hushed = await client.messages.create(**ask, thinking={"type": "disabled"})
        assert [block.type for block in hushed.content] == ["text", "tool_use", "tool_use"]
        omitted = {"type": "adaptive", "display": "omitted"}
        async with client.messages.stream(**ask, thinking=omitted) as stream:
            (empty, *_) = (await stream.get_final_message()).content
        assert empty == (await client.messages.create(**ask, thinking=omitted)).content[0]
        assert (empty.thinking, empty.signature) == ("", thought.signature)


async def test_call_within_thinking_is_a_call() -> None:
    template = CHAT_TEMPLATE + "{# <think> <tool_call> <function= #}{% if tools %}{% endif %}"
    text = "<think>first<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
    async with served(writes(text, template=template)) as (_stack, client):
        whole = await client.messages.create(**ASK | {"max_tokens": 150}, tools=[TOOL])
        thought, call = whole.content
        assert (thought.thinking, call.name, call.input, whole.stop_reason) == ("first", "f", {"a": 1}, "tool_use")


async def test_why_an_answer_ends() -> None:
    async with served(writes("one two three")) as (stack, client):
        done = await client.messages.create(**ASK | {"max_tokens": 50})
        assert (done.stop_reason, done.stop_sequence, done.content[0].text) == ("end_turn", None, "one two three")
        cut = await client.messages.create(**ASK | {"max_tokens": 50}, stop_sequences=["four", " three"])
        assert (cut.stop_reason, cut.stop_sequence, cut.content[0].text) == ("stop_sequence", " three", "one two")
        events = await raw_events(stack, **ASK | {"max_tokens": 50, "stop_sequences": [" three"]})
        assert events[-2]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": " three"}
        short = await client.messages.create(**ASK | {"max_tokens": 2})
        assert (short.stop_reason, short.usage.output_tokens) == ("max_tokens", 2)
    template = CHAT_TEMPLATE + "{% if tools %}{% endif %}"
    async with served(writes('{"a": 1}', template=template)) as (_stack, client):
        ask = {**ASK, "max_tokens": 4, "tools": [TOOL], "tool_choice": {"type": "tool", "name": "f"}}
        cut = await client.messages.create(**ask)
        assert (cut.stop_reason, cut.content[0].input) == ("max_tokens", {"INVALID_JSON": '{"a"'})
        called = await client.messages.create(**ask | {"max_tokens": 50})
        assert (called.stop_reason, called.content[0].input) == ("tool_use", {"a": 1})
    async with served() as (_stack, client):
        full = await client.messages.create(**ASK | {"max_tokens": 10**6})
        assert full.stop_reason == "model_context_window_exceeded"
        assert full.usage.input_tokens + full.usage.output_tokens == MAX_LEN


async def test_a_stream_outlives_its_worker_and_is_kept_alive_by_pings() -> None:
    workers = [Worker(f"w{i}", step_s=0.3, faults=[Fault("break", 3)]) for i in range(2)]
    async with served(*workers, Worker("w2", step_s=0.3), sse_heartbeat_s=0.05) as (stack, client):
        events = await raw_events(stack, **ASK, seed=1)
        assert stack.router.routes[-1].attempt > 1
        assert events[0] == {"type": "ping"}
        assert [event["type"] for event in events].count("ping") > 6
        for worker in stack.workers:
            worker.faults.clear()
            worker.step_s = 0.0
        whole = await client.messages.create(**SEEDED)
        deltas = [event["delta"]["text"] for event in events if event["type"] == "content_block_delta"]
        assert "".join(deltas) == whole.content[0].text


async def lose_all(stack: GatewayStack, client: anthropic.AsyncAnthropic) -> None:
    """Read a stream whose only worker is not replaced."""
    async with client.messages.stream(**ASK) as stream:
        async for event in stream:
            if event.type == "text":
                stack.router.empty = True


async def test_failures_are_the_clients_own_before_and_within_a_stream() -> None:
    stalls = Worker("w0", faults=[Fault("stall", 3)])
    async with served(stalls, progress_timeout_s=1.0, resume_deadline_s=0.2) as (stack, client):
        with pytest.raises(anthropic.APIStatusError) as broken:
            await lose_all(stack, client)
        assert broken.value.body["type"] == "error"
        assert broken.value.type in ("api_error", "overloaded_error")
        with pytest.raises(anthropic.APIStatusError) as away:
            await client.messages.create(**ASK)
        assert (away.value.status_code, away.value.type) == (503, "overloaded_error")
        assert int(away.value.response.headers["retry-after"]) >= 1


NEVER = {"type": "json_schema", "schema": {"const": 2**53 + 1}}


async def test_deeply_nested_value_is_rejected() -> None:
    used = [{"type": "tool_use", "id": "c", "name": "f", "input": "DEEP"}]
    given = [{"type": "tool_result", "tool_use_id": "c"}]
    called = [{"id": "c", "function": {"name": "f", "arguments": "DEEP"}}]
    bodies = {
        MESSAGES: ASK | {"messages": [{"role": "assistant", "content": used}, {"role": "user", "content": given}]},
        f"{MESSAGES}/count_tokens": {"messages": [HELLO], "tools": [{"name": "f", "input_schema": "DEEP"}]},
        "/v1/chat/completions": {"messages": [HELLO, {"role": "assistant", "tool_calls": called}, HELLO]},
    }
    async with served(Worker("w0", template=TELLING)) as (stack, _client):
        for depth in (200, 600, 800, 900, 960, 980, 990, 2000):
            deep = '{"a":' * depth + "1" + "}" * depth
            for path, body in bodies.items():
                value = json.dumps(deep) if "chat" in path else deep
                answer = await stack.http.post(path, content=json.dumps(body).replace('"DEEP"', value))
                assert answer.status_code == 400, (path, depth, answer.text)


async def test_many_tools_with_long_names_are_offered() -> None:
    template = "{% for t in tools %}{{ t.function.name[-1] }}{% endfor %}x"
    roomy = worker_pb2.ModelCard(max_model_len=1 << 20)
    async with served(Worker("w0", template=template, abilities=roomy)) as (stack, _client):
        tools = [TOOL | {"name": f"{number:x<127}y"} for number in range(200)]
        answer = await stack.http.post(MESSAGES, json=ASK | {"tools": tools, "max_tokens": 1})
        assert answer.status_code == 200, answer.text
        assert len(stack.workers[0].submits[-1].prompt_ids) == 201
        answer = await stack.http.post(MESSAGES, json=ASK | {"tools": [TOOL | {"name": "x" * 129}]})
        assert answer.json()["error"]["details"]["param"] == "tools[0].name"
        large = [TOOL | {"name": f"f{number}", "description": "d" * 5000} for number in range(200)]
        answer = await stack.http.post(MESSAGES, json=ASK | {"tools": large, "max_tokens": 1})
        assert answer.status_code == 200, answer.text


def blocks(*content: Any, role: str = "user", after: Sequence[Any] = ()) -> dict[str, Any]:
    return {"messages": [*after, {"role": role, "content": list(content)}]}


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
PDF = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "aGk="}}
ANSWER = {"role": "assistant", "content": "ho"}
NEW = (
    (IMAGE, "models here read text only"),
    (PDF, "it is no PDF"),
    ({"type": "container_upload", "file_id": "f"}, "files are read where"),
)
WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"max_tokens": None}, "max_tokens", "expected `int`"),
    ({"max_tokens": 0}, "max_tokens", ">= 1"),
    ({"messages": []}, "messages", "length >= 1"),
    (blocks({"type": "image", "source": {"type": "url", "url": "x"}}), "messages[0].content[0]", "`image`, which"),
    *((blocks(new, after=[HELLO, ANSWER]), "messages[2].content[0]", says) for new, says in NEW),
    (blocks({"type": "thinking", "thinking": "x"}), "messages[0].content[0]", "may not be"),
    (blocks({"type": "tool_result", "tool_use_id": "x"}), "messages[0].content[0].tool_use_id", "no earlier"),
    (blocks({"type": "tool_use", "id": "x", "name": "f", "input": {}}, role="assistant"), "messages[0]", "results"),
    ({"messages": [HELLO, {"role": "tool", "content": "x"}]}, "messages[1].role", "`assistant`, `developer`"),
    ({"system": [{"type": "image"}]}, "system[0]", "the vision of multimodal ones is not loaded"),
    ({"tools": [TOOL, TOOL]}, "tools", "two functions"),
    ({"tool_choice": {"type": "any"}}, "tool_choice", "needs `tools`"),
    ({"stop_sequences": ["a"] * 99}, "stop_sequences", "`stop_sequences` may hold at most"),
    ({"output_config": {"format": NEVER}, "output_format": NEVER}, "output_format", "Only one of"),
    ({"output_config": {"format": NEVER}}, "output_config.format.schema", "9007199254740993"),
    ({"container": "x"}, "container", "not supported"),
    ({"messages": [{"role": "user", "content": "long " * 600}]}, "messages", "maximum context length is 256"),
]


async def test_unsupported_request_is_rejected_by_field() -> None:
    async with served() as (stack, _client):
        for fields, param, says in WRONG:
            answer = await stack.http.post(MESSAGES, json=ASK | fields)
            body, error = answer.json(), answer.json()["error"]
            assert (answer.status_code, body["type"], error["type"]) == (400, "error", "invalid_request_error"), body
            assert error["details"]["param"] == param, body
            assert says in error["message"]
            assert body["request_id"] == answer.headers["request-id"]
        used = await stack.http.get(MESSAGES)
        assert (used.status_code, used.json()["type"]) == (405, "error")
