"""Coding agents: their requests are answered, what they offer in vain is listed, and their calls find their tools."""

from __future__ import annotations

import json
import tomllib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from ryzanstein.v1 import worker_pb2

from services.gateway.api.ignored import IGNORED_HEADER
from tests.integration.gateway import fleet
from tests.integration.gateway.client_shapes import CODEX, QWEN_CODE, SHAPES
from tests.integration.gateway.fleet import CHAT_TEMPLATE
from tests.integration.gateway.gateways import GatewayStack, running_stack
from tests.integration.gateway.test_chat_prompts import text_of
from tests.integration.gateway.test_messages import writes
from tests.integration.gateway.test_responses import events_of

TABLE = tomllib.loads((Path(__file__).parents[3] / "docs/reference/clients.toml").read_text())["client"]
TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name }}\n{% endfor %}" + CHAT_TEMPLATE.split("{% if")[0]
    + "{% for m in messages %}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>"
    "{% endfor %}{% endfor %}"
)  # fmt: skip
CALLS = {
    "read": '<tool_call>\n{"name": "read", "arguments": {"path": "a"}}\n</tool_call>',
    "close": '<tool_call>\n{"name": "agents_v1__close", "arguments": {}}\n</tool_call>',
    "patch": '<tool_call>\n{"name": "patch", "arguments": {"input": "+ \\"a\\"\\n"}}\n</tool_call>',
}


@pytest.fixture
async def stack(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[GatewayStack]:
    """A model that calls one tool after the other."""
    monkeypatch.setattr(fleet, "MAX_LEN", 8192)
    async with running_stack([writes("\n".join(CALLS.values()), template=TEMPLATE)]) as running:
        yield running


def test_the_table_has_every_shape() -> None:
    assert {client["shape"] for client in TABLE if "shape" in client} == set(SHAPES)


@pytest.mark.parametrize("name", SHAPES)
async def test_an_agent_is_answered_and_goes_on_from_its_tools(stack: GatewayStack, name: str) -> None:
    shape = SHAPES[name]
    for turn in (shape.body[shape.conversation], [*shape.body[shape.conversation], *shape.result]):
        answer = await stack.http.post(shape.path, json=shape.body | {shape.conversation: turn})
        assert answer.status_code == 200, answer.text
        assert "read" in answer.text
        hosted = [tool["type"] for tool in shape.body["tools"] if tool.get("type", "").startswith("web_search")]
        assert answer.headers.get(IGNORED_HEADER, "") == ", ".join(f"tools[].type={kind}" for kind in hosted)
    prompt = text_of(list(stack.workers[0].submits[-1].prompt_ids))
    assert prompt.startswith("read\n")
    assert "web_search" not in prompt
    assert '"path": "a.txt"' in prompt
    assert "words" in prompt


async def test_calls_have_the_names_of_the_tools_that_were_offered(stack: GatewayStack) -> None:
    streamed = events_of((await stack.http.post(CODEX.path, json=CODEX.body)).text)
    whole = (await stack.http.post(CODEX.path, json=CODEX.body | {"stream": False})).json()
    done = [event["item"] for event in streamed if event["type"] == "response.output_item.done"]
    for items in (done, whole["output"]):
        called = [{key: item.get(key) for key in ("type", "name", "namespace", "arguments", "input")} for item in items]
        assert called == [
            {"type": "function_call", "name": "read", "namespace": None, "arguments": '{"path": "a"}', "input": None},
            {"type": "function_call", "name": "close", "namespace": "agents_v1", "arguments": "{}", "input": None},
            {"type": "custom_tool_call", "name": "patch", "namespace": None, "arguments": None, "input": '+ "a"\n'},
        ]
    inputs = [event for event in streamed if event["type"].startswith("response.custom_tool_call_input")]
    assert [event.get("delta", event.get("input")) for event in inputs] == ['+ "a"\n'] * 2
    assert [tool["type"] for tool in whole["tools"]] == ["function", "namespace", "custom"]


async def test_tool_results_of_an_agent_are_in_the_prompt_under_the_same_names(stack: GatewayStack) -> None:
    body = CODEX.body | {"input": [*CODEX.body["input"], *CODEX.result], "stream": False}
    assert (await stack.http.post(CODEX.path, json=body)).status_code == 200
    prompt = text_of(list(stack.workers[0].submits[-1].prompt_ids))
    for name, arguments in (("agents_v1__close", "{}"), ("patch", '{"input": "+ a"}')):
        assert f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>' in prompt
    assert prompt.startswith("read\nagents_v1__close\npatch\n")


async def test_tools_in_the_conversation_are_offered_like_tools_of_the_body(stack: GatewayStack) -> None:
    """Codex has all its tools there when it knows the model, and those that it has searched for."""
    read, group, patch, hosted = CODEX.body["tools"]
    added = {"type": "additional_tools", "role": "developer", "tools": [patch, hosted, {"type": "teleport"}]}
    malformed = [{"type": "custom"}, {"type": "function", "name": "f", "parameters": 5}, {"type": 1}, "f", None]
    added["tools"] += malformed
    unlisted = added | {"tools": "f"}
    searched = [
        {"type": "tool_search_call", "execution": "client", "call_id": "s1", "arguments": {"query": "end"}},
        {"type": "tool_search_output", "execution": "client", "call_id": "s1", "tools": [group, read, patch]},
        {"role": "user", "content": "Go on."},
    ]
    body = {**CODEX.body, "tools": [read], "stream": False, "input": [added, unlisted, *CODEX.body["input"], *searched]}
    answer = await stack.http.post(CODEX.path, json=body)
    names = [(item["type"], item["name"], item.get("namespace")) for item in answer.json()["output"]]
    assert names == [
        ("function_call", "read", None), ("function_call", "close", "agents_v1"), ("custom_tool_call", "patch", None)
    ]  # fmt: skip
    assert [tool["name"] for tool in answer.json()["tools"]] == ["read"]
    left_out = ("input[].tools[].type=web_search", "input[].tools[].type=teleport", "input[].tools[]", "input[].tools")
    assert answer.headers[IGNORED_HEADER] == ", ".join(left_out)
    prompt = text_of(list(stack.workers[0].submits[-1].prompt_ids))
    assert prompt.startswith("read\npatch\nagents_v1__close\n<|im_start|>"), "each once"
    assert '<tool_call>{"name": "tool_search", "arguments": {"query": "end"}}</tool_call>' in prompt
    assert "<|im_start|>tool\nagents_v1\nread\npatch<|im_end|>" in prompt


FORCED: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/responses", {"tool_choice": {"type": "web_search"}}, "tool_choice"),
    ("/v1/responses", {"tools": [{"type": "mcp", "server_label": "a"}], "tool_choice": "required"}, "tool_choice"),
    ("/v1/messages", {"tool_choice": {"type": "tool", "name": "web_search"}}, "tool_choice"),
    ("/v1/responses", {"tool_choice": {"type": "teleport"}}, "tool_choice"),
    ("/v1/responses", {"tools": [{"type": 1}]}, "tools[0].type"),
    ("/v1/responses", {"tools": [{"type": "function", "name": "n__f"}, {"type": "namespace", "name": "n", "tools": [
        {"type": "custom", "name": "f"}]}]}, "tools"),
    ("/v1/messages", {"tools": [{"type": 1, "name": "x"}]}, "tools[0].type"),
    ("/v1/messages", {"tools": [{"name": "x"}]}, "tools[0].input_schema"),
]  # fmt: skip


async def test_a_hosted_tool_that_must_be_called_is_refused(stack: GatewayStack) -> None:
    for path, fields, param in FORCED:
        shape = next(shape for shape in SHAPES.values() if shape.path.startswith(path))
        answer = await stack.http.post(path, json=shape.body | fields)
        error = answer.json()["error"]
        assert (answer.status_code, (error.get("details") or error)["param"]) == (400, param), answer.text


HOSTED: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/responses", {"tools": [{"type": "x_search"}, {"type": "memory"}]},
     "tools[].type=x_search, tools[].type=memory"),
    ("/v1/responses", {"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "mcp"}]}]},
     "tools[].tools[].type=mcp"),
    ("/v1/responses", {"tools": [], "include": ["of.next_year"], "context_management": [{"type": "compaction"}]},
     "include=of.next_year, context_management"),
    ("/v1/messages", {"tools": [{"type": "tool_search_tool_regex", "name": "tool_search_tool_regex"}]},
     "tools[].type=tool_search_tool_regex"),
    ("/v1/messages", {"tools": [{"type": "mcp_toolset", "mcp_server_name": "a"}, {"type": "advisor", "name": []}],
                      "mcp_servers": [{"type": "url", "url": "https://a.example", "name": "a"}]},
     "tools[].type=mcp_toolset, tools[].type=advisor, mcp_servers"),
    ("/v1/chat", {"tools": [{"type": "openrouter:web_search"}]}, "tools[].type=openrouter:web_search"),
]  # fmt: skip


async def test_a_tool_of_an_unknown_type_is_left_out(stack: GatewayStack) -> None:
    for path, fields, left_out in HOSTED:
        shape = next(shape for shape in SHAPES.values() if shape.path.startswith(path))
        answer = await stack.http.post(shape.path, json=shape.body | fields)
        assert answer.status_code == 200, answer.text
        assert answer.headers[IGNORED_HEADER] == left_out


async def test_a_choice_names_tools_of_any_kind(stack: GatewayStack) -> None:
    allowed = [{"type": "function", "name": "close", "namespace": "agents_v1"}, {"type": "web_search"}]
    choice = {"type": "allowed_tools", "mode": "auto", "tools": allowed}
    answer = await stack.http.post(CODEX.path, json=CODEX.body | {"tool_choice": choice})
    assert answer.status_code == 200, answer.text
    assert text_of(list(stack.workers[0].submits[-1].prompt_ids)).startswith("agents_v1__close\n<|im_start|>")
    answer = await stack.http.post(CODEX.path, json=CODEX.body | {"tool_choice": {"type": "none"}, "stream": False})
    assert [item["type"] for item in answer.json()["output"]] == ["message"]
    named = {"tool_choice": {"type": "custom", "name": "patch"}, "stream": False}
    (item,) = (await stack.http.post(CODEX.path, json=CODEX.body | named)).json()["output"]
    assert (item["type"], item["name"]) == ("custom_tool_call", "patch")


async def test_token_count_of_an_agent_prompt_equals_billed_tokens(stack: GatewayStack) -> None:
    for name, path in (("codex", "/v1/responses/input_tokens"), ("claude-code", "/v1/messages/count_tokens")):
        shape, needed = (
            SHAPES[name],
            ("input", "tools", "tool_choice", "messages", "system", "thinking", "output_config"),
        )
        counted = await stack.http.post(path, json={key: shape.body[key] for key in needed if key in shape.body})
        assert counted.headers[IGNORED_HEADER].startswith("tools[].type=web_search")
        billed = await stack.http.post(shape.path, json=shape.body | {"stream": False})
        assert counted.json()["input_tokens"] == billed.json()["usage"]["input_tokens"], json.dumps(counted.json())


async def test_calls_of_custom_tools_have_the_text_of_their_input() -> None:
    custom = {"type": "custom", "custom": {"name": "patch", "description": "Patches", "format": {
        "type": "grammar", "grammar": {"syntax": "lark", "definition": "start: /.+/"}}}}  # fmt: skip
    history = [
        {"role": "user", "content": "Go."},
        {"role": "assistant", "tool_calls": [
            {"id": "c1", "type": "custom", "custom": {"name": "patch", "input": "- old"}}]},
        {"role": "tool", "tool_call_id": "c1", "content": "patched"},
    ]  # fmt: skip
    text = (
        '<tool_call>\n{"name": "patch", "arguments": {"input": "+ a\\n\\"b\\""}}\n</tool_call>\n'
        '<tool_call>\n{"name": "read", "arguments": {"path": "a"}}\n</tool_call>'
    )
    body: dict[str, Any] = {"messages": history, "tools": [custom, *QWEN_CODE.body["tools"]], "max_tokens": 200}
    path, roomy = QWEN_CODE.path, worker_pb2.ModelCard(max_model_len=4096)
    async with running_stack([writes(text, template=TEMPLATE, abilities=roomy)]) as stack:
        message = (await stack.http.post(path, json=body)).json()["choices"][0]["message"]
        first, second = [{key: call[key] for key in call if key != "id"} for call in message["tool_calls"]]
        assert first == {"type": "custom", "custom": {"name": "patch", "input": '+ a\n"b"'}}
        assert second["function"] == {"name": "read", "arguments": '{"path": "a"}'}
        assert all(call["id"] for call in message["tool_calls"])
        prompt = text_of(list(stack.workers[0].submits[-1].prompt_ids))
        assert '{"name": "patch", "arguments": {"input": "- old"}}' in prompt
        streamed: dict[int, list[dict[str, Any]]] = {}
        for frame in (await stack.http.post(path, json=body | {"stream": True})).text.split("\n\n")[:-2]:
            delta = json.loads(frame.removeprefix("data: "))["choices"][0]["delta"]
            for call in delta.get("tool_calls", ()):
                streamed.setdefault(call["index"], []).append(call)
        assert [call["type"] for calls in streamed.values() for call in calls if "id" in call] == ["custom", "function"]
        assert "".join(call["custom"]["input"] for call in streamed[0]) == '+ a\n"b"'
        assert "".join(call["function"]["arguments"] for call in streamed[1]) == '{"path": "a"}'
        chosen = body | {"tool_choice": {"type": "custom", "custom": {"name": "patch"}}}
        assert (await stack.http.post(path, json=chosen)).status_code == 200
