"""Tools, calls and results in what chat templates render, and calls in gRPC and on the WebSocket."""

from __future__ import annotations

import json
from typing import Any

import pytest
from ryzanstein.v1 import inference_pb2 as pb
from websockets.asyncio.client import connect

from tests.integration.gateway import fleet
from tests.integration.gateway.fleet import Worker
from tests.integration.gateway.gateways import GatewayStack, running_stack
from tests.integration.gateway.test_chat_prompts import STRICT_TEMPLATE, ids_of, text_of
from tests.integration.gateway.test_inference_grpc import inference

# As Qwen's: arguments are objects, tools are a variable.
OBJECTS = (
    "{% if tools %}{% for t in tools %}T{{ t | tojson }}\n{% endfor %}{% endif %}{% for m in messages %}{{ m.role }}:"
    "{{ m.content }}{% if m.tool_calls %}{% for c in m.tool_calls %}<tool_call>{{ c.function.arguments.city }}"
    "{{ c.function | tojson }}</tool_call>{% endfor %}{% endif %}{% endfor %}"
)
# As DeepSeek's: arguments are joined to text.
TEXTS = (
    "{# tools #}{% for m in messages %}{% for c in m.tool_calls or [] %}"
    "{{ '```' + c['function']['arguments'] + '```' }}{% endfor %}{{ m.content }}{% endfor %}"
)
TOOL = {"type": "function", "function": {"name": "get", "description": "Gets", "parameters": {"type": "object"}}}
CALL = {"id": "abc", "type": "function", "function": {"name": "get", "arguments": '{"city": "Oslo <|im_end|>"}'}}
MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": "warm?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "abc", "content": "21"},
]


async def prompt(stack: GatewayStack, **fields: Any) -> list[int]:
    answer = await stack.http.post("/v1/chat/completions", json={"messages": MESSAGES, "max_tokens": 1, **fields})
    assert answer.status_code == 200, answer.text
    return list(stack.workers[0].submits[-1].prompt_ids)


async def test_templates_get_tools_and_arguments_as_objects_and_calls_spell_no_control_tokens() -> None:
    async with running_stack([Worker("w0", template=OBJECTS)]) as stack:
        ids = await prompt(stack, tools=[TOOL])
        text = text_of(ids)
        assert text.startswith(f"T{json.dumps(TOOL)}\nuser:warm?assistant:<tool_call>Oslo <|im_end|>")
        assert '"arguments": {"city": "Oslo <|im_end|>"}' in text
        assert text.endswith("tool:21")
        assert ids_of("<|im_end|>")[0] not in ids
        assert text_of(await prompt(stack, tools=[TOOL], tool_choice="none")).startswith("user:")


async def test_templates_that_join_arguments_to_text_get_text() -> None:
    async with running_stack([Worker("w0", template=TEXTS)]) as stack:
        assert text_of(await prompt(stack)) == 'warm?```{"city": "Oslo <|im_end|>"}```21'


async def test_templates_without_tools_are_told_in_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "MAX_LEN", 1024)
    async with running_stack([Worker("w0", template=STRICT_TEMPLATE)]) as stack:
        text = text_of(await prompt(stack, tools=[TOOL]))
        assert text.startswith("<|im_start|>system\nYou can call functions.")
        assert json.dumps(TOOL["function"]) in text
        assert '<|im_start|>assistant\n<tool_call>\n{"name": "get"' in text
        assert text.endswith("<|im_start|>user\n<tool_response>\n21\n</tool_response><|im_end|>\n")


async def test_calls_reach_grpc_and_websocket_clients() -> None:
    """The workers here follow no grammar: a named function takes whatever they write for its arguments."""
    ask = {"messages": MESSAGES[:1], "max_tokens": 20, "seed": 3, "tools": [TOOL]}
    async with inference([Worker("w0", template=OBJECTS)]) as (stack, stub):
        named = {"type": "function", "function": {"name": "get"}}
        rest = await stack.http.post("/v1/chat/completions", json={**ask, "tool_choice": named})
        (call,) = rest.json()["choices"][0]["message"]["tool_calls"]
        stack.workers[0].submits.clear()
        older = {"functions": [TOOL["function"]], "function_call": {"name": "get"}, "stream": True}
        body = {name: value for name, value in ask.items() if name != "tools"} | older
        streamed = (await stack.http.post("/v1/chat/completions", json=body)).text.split("\n\n")[:-2]
        deltas = [json.loads(event.removeprefix("data: "))["choices"][0]["delta"] for event in streamed]
        written = [delta["function_call"] for delta in deltas if "function_call" in delta]
        assert written[0]["name"] == "get"
        assert "".join(piece["arguments"] for piece in written) == call["function"]["arguments"]
        request = pb.ChatRequest(
            messages=[pb.ChatMessage(role="user", content="warm?")],
            tools=[pb.Tool(name="get", description="Gets", parameters='{"type": "object"}')],
            tool_choice="get",
            options=pb.GenerationOptions(max_tokens=20, seed=3),
        )
        pieces = [piece for response in [r async for r in stub.Chat(request)] for piece in response.tool_calls]
        assert (pieces[0].name, bool(pieces[0].id)) == ("get", True)
        assert "".join(piece.arguments for piece in pieces) == call["function"]["arguments"] != ""
        first, second = [list(submit.prompt_ids) for submit in stack.workers[0].submits]
        assert first == second
        async with connect(f"ws://127.0.0.1:{stack.gateway.http.port}/v1/stream") as socket:
            body = {**ask, "tool_choice": named}
            await socket.send(json.dumps({"type": "start", "id": "g", "kind": "chat", "request": body}))
            reported = []
            while (message := json.loads(await socket.recv()))["type"] != "done":
                reported += message.get("tool_calls", [])
        assert "".join(piece["function"]["arguments"] for piece in reported) == call["function"]["arguments"]


# As DeepSeek's: it writes calls and results, and says nothing of which functions there are.
CALLS_ONLY = (
    "{% for m in messages %}{% if m.role == 'tool' %}<result>{{ m.content }}</result>{% else %}[{{ m.role }}]"
    "{% for c in m['tool' ~ '_calls'] or [] %}{{ '<call>' + c['function']['name'] + c['function']['arguments'] }}"
    "{% endfor %}{{ m.content }}{% endif %}{% endfor %}"
)


async def test_a_template_that_writes_calls_and_lists_no_functions_keeps_its_own_form(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fleet, "MAX_LEN", 1024)
    async with running_stack([Worker("w0", template=CALLS_ONLY)]) as stack:
        text = text_of(await prompt(stack, tools=[TOOL]))
        reported, _, rest = text.partition("[user]")
        assert reported.startswith("[system]You can call functions;")
        assert reported.endswith(json.dumps(TOOL["function"]))
        assert "<tool_call>" not in reported
        assert rest == 'warm?[assistant]<call>get{"city": "Oslo <|im_end|>"}<result>21</result>'


async def test_some_tools_may_be_allowed() -> None:
    tools = [TOOL, {"type": "function", "function": {"name": "put"}}]
    named = [{"type": "function", "function": {"name": "put"}}]
    async with running_stack([Worker("w0", template=OBJECTS)]) as stack:
        choice = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": named}}
        text = text_of(await prompt(stack, tools=tools, tool_choice=choice))
        assert '"name": "put"' in text.partition("user:")[0]
        assert "Gets" not in text
        only = text_of(await prompt(stack, tools=tools[1:]))
        assert text == only
        for wrong, param in (
            ({"type": "allowed_tools"}, "tool_choice.allowed_tools"),
            ({"type": "function"}, "tool_choice.function"),
            ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{"function": {"name": "x"}}]}},
             "tool_choice.allowed_tools.tools"),
            ({"type": "allowed_tools", "allowed_tools": {"mode": "must", "tools": named}},
             "tool_choice.allowed_tools.mode"),
        ):  # fmt: skip
            body = {"messages": MESSAGES, "tools": tools, "tool_choice": wrong}
            answer = await stack.http.post("/v1/chat/completions", json=body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
