"""Anthropic's client against the real system: text, streams, tools, structured output, counts, errors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import anthropic
import jsonschema
import pytest
from pydantic import BaseModel

from tests.stack import RunningStack

MODEL = "ryzanstein-tiny"
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 16}, "unit": {"enum": ["C", "F"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"name": "get_weather", "description": "Of a city", "input_schema": WEATHER},
    {"name": "now", "input_schema": {"type": "object", "properties": {}, "additionalProperties": False}},
]
ASK: Any = {
    "model": MODEL,
    "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
    "messages": [{"role": "user", "content": "How warm is it?"}],
    "max_tokens": 400,
}


@pytest.fixture(scope="module")
def client(stack: RunningStack) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=stack.url, api_key="unused", max_retries=0, timeout=60) as client:
        yield client


def counted(ask: dict[str, Any]) -> dict[str, Any]:
    return {key: ask[key] for key in ("model", "system", "messages", "tools", "tool_choice") if key in ask}


def whole_and_streamed(client: anthropic.Anthropic, seed: int, **ask: Any) -> tuple[Any, Any, list[Any]]:
    """The same message twice, and the events of the second."""
    seeded = {**ask, "extra_body": {"seed": seed}}
    whole = client.messages.create(**seeded)
    with client.messages.stream(**seeded) as stream:
        events = list(stream)
        streamed = stream.get_final_message()
    for block, same in zip(whole.content, streamed.content, strict=True):
        hidden: Any = {"id", "parsed_output"}
        assert block.model_dump(exclude=hidden) == same.model_dump(exclude=hidden)
    assert (whole.stop_reason, whole.stop_sequence, whole.usage) == (
        streamed.stop_reason,
        streamed.stop_sequence,
        streamed.usage,
    )
    assert client.messages.count_tokens(**counted(ask)).input_tokens == whole.usage.input_tokens
    return whole, streamed, events


def test_text_whole_and_streamed(client: anthropic.Anthropic) -> None:
    whole, streamed, events = whole_and_streamed(client, 3, **ASK | {"max_tokens": 24})
    (block,) = whole.content
    assert (block.type, whole.role, whole.model) == ("text", "assistant", MODEL)
    assert whole.stop_reason in ("end_turn", "max_tokens")
    assert whole.usage.output_tokens <= 24
    assert "".join(event.text for event in events if event.type == "text") == block.text
    assert whole.id != streamed.id
    stop = block.text.split()[1]
    cut = client.messages.create(**ASK, stop_sequences=["never said", stop], extra_body={"seed": 3})
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", stop)
    assert cut.content[0].text == block.text[: block.text.index(stop)]


def test_tools_are_called_and_their_results_go_on(client: anthropic.Anthropic) -> None:
    for choice in ({"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "get_weather"}):
        ask = {**ASK, "tools": TOOLS[:1], "tool_choice": choice}
        whole, streamed, events = whole_and_streamed(client, 5, **ask)
        (call,) = streamed.content
        assert (whole.stop_reason, call.type, call.name) == ("tool_use", "tool_use", "get_weather")
        jsonschema.validate(call.input, WEATHER)
        assert any(event.type == "input_json" for event in events)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "21 degrees"}]}
    history = [*ASK["messages"], streamed.to_param(), {"role": "user", "content": [result]}]
    answer, *_ = whole_and_streamed(client, 6, **{**ASK, "messages": history, "tools": TOOLS})
    bare = client.messages.count_tokens(**counted({**ASK, "tools": TOOLS}))
    assert answer.usage.input_tokens > bare.input_tokens + 20  # the call and its result are in the prompt
    many = client.messages.create(**ASK, tools=TOOLS, tool_choice={"type": "any"}, extra_body={"seed": 7})
    for call in many.content:
        jsonschema.validate(call.input, TOOLS[[tool["name"] for tool in TOOLS].index(call.name)]["input_schema"])
    untold = client.messages.create(**ASK, tools=TOOLS, tool_choice={"type": "none"})
    assert untold.usage.input_tokens == client.messages.count_tokens(**counted(ASK)).input_tokens


def test_the_clients_own_loop_runs_tools(client: anthropic.Anthropic) -> None:
    seen = []

    @anthropic.beta_tool
    def is_warm(warm: bool) -> str:
        """Say it."""
        seen.append(warm)
        return "noted"

    forced: Any = {"type": "tool", "name": "is_warm"}
    runner = client.beta.messages.tool_runner(**ASK, tools=[is_warm], tool_choice=forced, max_iterations=2)
    assert [message.stop_reason for message in runner] == ["tool_use", "tool_use"]
    assert len(seen) == 2


class Answer(BaseModel):
    unit: Literal["C", "F"]
    certain: bool


def test_structured_output_is_parsed(client: anthropic.Anthropic) -> None:
    parsed = client.messages.parse(**ASK, output_format=Answer)
    assert isinstance(parsed.parsed_output, Answer)
    with client.messages.stream(**ASK, output_format=Answer) as stream:
        assert isinstance(stream.get_final_message().parsed_output, Answer)


def test_the_answers_beginning_may_be_given(client: anthropic.Anthropic) -> None:
    begun = [*ASK["messages"], {"role": "assistant", "content": "It is"}]
    whole, *_ = whole_and_streamed(client, 8, **{**ASK, "messages": begun, "max_tokens": 8})
    assert whole.usage.input_tokens > client.messages.count_tokens(**counted(ASK)).input_tokens


def test_errors_are_the_clients_own(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as unknown:
        client.messages.create(**{**ASK, "model": "nope"})
    assert (unknown.value.type, unknown.value.error_code) == ("not_found_error", "model_not_found")
    assert unknown.value.request_id
    assert unknown.value.body["request_id"] == unknown.value.request_id  # type: ignore[index]
    with pytest.raises(anthropic.BadRequestError) as bad:
        client.messages.create(**ASK, tools=TOOLS, tool_choice={"type": "tool", "name": "other"})
    assert bad.value.type == "invalid_request_error"
    assert "`other`, which is not among `tools`" in (bad.value.api_message or "")
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
