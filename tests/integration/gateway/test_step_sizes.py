"""Steps of several tokens give what steps of one token give: texts, usage, log-probabilities, finish reasons, calls."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ryzanstein.v1 import inference_pb2 as pb

from tests.integration.gateway.fleet import Fault, Worker
from tests.integration.gateway.gateways import GatewayStack, running_stack
from tests.integration.gateway.test_inference_grpc import inference
from tests.integration.gateway.test_stream_socket import SocketClient, connect
from tests.unit.gateway.made_tokenizers import byte_level

TEXT = "<think>Größe 🙂 then</think>\n\nHello, 你好 👍🏽 you. STOP here, and stop there."
CALLS = '<think>f?</think>On it. <tool_call>{"name": "f", "arguments": {"a": "é🙂"}}</tool_call>\n'
CALLS += '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
TEMPLATE = (
    "{% if tools %}{{ tools[0].function.name }}<tool_call>{% endif %}<think>"
    "{% for m in messages %}{{ m.role }}{{ m.content }}{{ m.tool_calls }}{% endfor %}"
)
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "return_token_ids": True}
COMPLETION: dict[str, Any] = {"prompt": "a", "max_tokens": 200, "return_token_ids": True}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
OWN_TOOLS = [{"name": "f", "input_schema": {"type": "object"}}]
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "text": ("completions", COMPLETION),
    "two choices, scored, echoed": ("completions", COMPLETION | {"n": 2, "logprobs": 2, "echo": True}),
    "stop string": ("completions", COMPLETION | {"stop": ["P h", "top"], "logprobs": 0}),
    "stop string, shown": ("completions", COMPLETION | {"stop": ["好 👍"], "include_stop_str_in_output": True}),
    "stop string late": ("completions", COMPLETION | {"stop": ["e"], "min_tokens": 24, "logprobs": 1}),
    "stop string in the last token": ("completions", COMPLETION | {"stop": ["there."]}),
    "limit": ("completions", COMPLETION | {"max_tokens": 23, "logprobs": 1}),
    "limit within a character": ("completions", COMPLETION | {"max_tokens": 13}),
    "prompt alone": ("completions", COMPLETION | {"max_tokens": 0, "echo": True, "logprobs": 1}),
    "no end": ("completions", COMPLETION | {"ignore_eos": True, "max_tokens": 40}),
    "chat": ("chat/completions", CHAT),
    "chat, scored": ("chat/completions", CHAT | {"logprobs": True, "top_logprobs": 2, "n": 2}),
    "chat, stop string": ("chat/completions", CHAT | {"stop": ["</think>\n\nHello,", "STO"], "logprobs": True}),
    "calls": ("chat/completions", CHAT | {"tools": TOOLS}),
    "one call, cut": ("chat/completions", CHAT | {"tools": TOOLS, "max_tokens": 30}),
    "messages": ("messages", {"messages": CHAT["messages"], "max_tokens": 100, "tools": OWN_TOOLS}),
    "response, cut": ("responses", {"input": "hi", "store": False, "max_output_tokens": 9}),
    "response": ("responses", {"input": "hi", "store": False, "tools": [TOOLS[0]["function"] | {"type": "function"}]}),
}
MADE_ANEW = ("id", "call_id", "item_id", "created", "created_at", "completed_at")  # by every answer


@pytest.fixture
async def stack() -> AsyncIterator[GatewayStack]:
    async with running_stack([Worker("w0", template=TEMPLATE), Worker("w1", template=TEMPLATE)]) as running:
        yield running


def plain(value: Any) -> Any:
    """An answer without the parts that are made anew."""
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items() if key not in MADE_ANEW}
    return [plain(inner) for inner in value] if isinstance(value, list) else value


def joined(whole: Any, part: Any) -> Any:
    """A streamed value with the next part of it."""
    if isinstance(part, dict) and isinstance(whole, dict):
        return whole | {key: joined(whole.get(key), value) for key, value in part.items()}
    if isinstance(part, list) and isinstance(whole, list):
        if not part or not isinstance(part[0], dict) or "index" not in part[0]:
            return whole + part
        by_index = {one["index"]: one for one in whole}
        for one in part:
            index = one["index"]
            by_index[index] = joined(by_index.get(index), one)
        return [by_index[index] for index in sorted(by_index)]
    if isinstance(part, str) and isinstance(whole, str):
        return whole + part
    return whole if part is None else part


def streamed(text: str) -> Any:
    """All events of a stream as one answer."""
    whole: Any = None
    for line in text.split("\n"):
        if line.startswith("data: {"):
            event = plain(json.loads(line[6:]))
            event.pop("object", None)
            event.pop("model", None)
            whole = joined(whole, event)
    return whole


async def answers(stack: GatewayStack, form: str, sizes: Sequence[int], lost_at: int | None = None) -> list[Any]:
    """The whole and, of the APIs whose frames are parts of it, the streamed answer."""
    path, body = FORMS[form]
    ids = byte_level().encode(CALLS if "tools" in body else TEXT).ids
    for worker in stack.workers:
        worker.sizes, worker.end_at = tuple(sizes), len(ids)
        worker.token = lambda prompt, seed, position: ids[position % len(ids)]
        worker.faults = [] if lost_at is None else [Fault("handoff", lost_at)]
    actual = [plain((await stack.http.post(f"/v1/{path}", json=body)).json())]
    if path.endswith("completions"):
        options = {"include_usage": True}
        answer = await stack.http.post(f"/v1/{path}", json=body | {"stream": True, "stream_options": options})
        actual.append(streamed(answer.text))
    return actual


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=3, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sizes=st.lists(st.integers(1, 16), min_size=1, max_size=6), lost_at=st.none() | st.integers(0, 40))
async def test_answer_is_that_of_steps_of_one_token(
    stack: GatewayStack, form: str, sizes: list[int], lost_at: int | None
) -> None:
    assert await answers(stack, form, sizes, lost_at) == await answers(stack, form, [1])


@pytest.mark.parametrize("sizes", [(5,), (1, 7, 2), (16,)])
async def test_grpc_and_websocket_answers_are_those_of_steps_of_one_token(sizes: tuple[int, ...]) -> None:
    ids = byte_level().encode(TEXT).ids
    worker = Worker("w0", template=TEMPLATE, token=lambda prompt, seed, position: ids[position], end_at=len(ids))
    options = pb.GenerationOptions(max_tokens=60, n=2, logprobs=1, stop=["P h"])
    request = pb.GenerateRequest(prompt="a", echo=True, options=options)
    body = {"prompt": "a", "max_tokens": 60, "stop": ["P h"], "logprobs": 1, "include_stop_str_in_output": True}
    actual: list[Any] = []
    async with inference([worker]) as (stack, stub):
        for worker.sizes in ((1,), sizes):
            wholes = [pb.GenerateResponse() for _ in range(2)]
            async for response in stub.Generate(request):
                whole = wholes[response.choice]
                assert response.first_index == len(whole.ids)
                text, finish = whole.text + response.text, whole.finish_reason + response.finish_reason
                whole.MergeFrom(response)
                whole.text, whole.finish_reason, whole.request_id, whole.first_index = text, finish, "", 0
            wholes[0].usage.MergeFrom(wholes[1].usage)  # stands in the stream's last message
            async with connect(stack) as socket:
                client = SocketClient(socket)
                await client.send(type="start", id="x", kind="completion", request=body)
                done = await client.until("done")
            actual.append((wholes[0], wholes[1].ids, client.text, client.ids, done))
    assert actual[0] == actual[1]
    assert actual[0][2]["x"].endswith("STOP h")


def tokens_before(text: str, tag: str) -> int:
    """The number of tokens up to the end of a tag."""
    ids = byte_level().encode(text).ids
    return next(count for count in range(len(ids)) if tag in byte_level().decode(ids[:count]))


async def test_forms_end_as_named(stack: GatewayStack) -> None:
    endings = {form: [choice["finish_reason"] for choice in (await answers(stack, form, [5]))[0].get("choices", ())]
               for form in FORMS}  # fmt: skip
    limited = {"limit", "limit within a character", "prompt alone", "no end", "one call, cut"}
    assert {form for form, reasons in endings.items() if "length" in reasons} == limited
    assert endings["calls"] == ["tool_calls"]
    used = [(await answers(stack, form, [16]))[0]["usage"] for form in ("response", "response, cut")]
    assert [usage["output_tokens_details"]["reasoning_tokens"] for usage in used] == [
        tokens_before(CALLS, "</think>") - tokens_before(CALLS, "<think>") + 1,
        9 - tokens_before(TEXT, "<think>") + 1,
    ]
    text = (await answers(stack, "stop string", [16]))[0]
    assert text["choices"][0]["text"].endswith("STO")
    assert text["usage"]["completion_tokens"] == len(text["choices"][0]["token_ids"])
