"""Open Responses: the requests of its compliance test, and every answer and event read by its published types.

Without images and files, which the bundled model does not take. Answers may also end at the limit of tokens.
"""

import json
import sys
from typing import Any

import httpx
from openresponses_types import types
from pydantic import TypeAdapter

URL = f"{sys.argv[1]}/v1/responses"
MODEL = "ryzanstein-tiny"
EVENTS: Any = TypeAdapter(
    types.ResponseCreatedStreamingEvent
    | types.ResponseInProgressStreamingEvent
    | types.ResponseCompletedStreamingEvent
    | types.ResponseIncompleteStreamingEvent
    | types.ResponseOutputItemAddedStreamingEvent
    | types.ResponseOutputItemDoneStreamingEvent
    | types.ResponseContentPartAddedStreamingEvent
    | types.ResponseContentPartDoneStreamingEvent
    | types.ResponseOutputTextDeltaStreamingEvent
    | types.ResponseOutputTextDoneStreamingEvent
    | types.ResponseFunctionCallArgumentsDeltaStreamingEvent
    | types.ResponseFunctionCallArgumentsDoneStreamingEvent
)
TOOL = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather of a place",
    "parameters": {
        "type": "object",
        "properties": {"location": {"type": "string", "maxLength": 12}},
        "required": ["location"],
    },
}


def post(path: str = "", **body: Any) -> httpx.Response:
    """An answer that is no error."""
    types.CreateResponseBody.model_validate(body)
    answer = httpx.post(URL + path, json={"model": MODEL, **body}, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer


def read(response: dict[str, Any]) -> Any:
    """A response with output, as its type."""
    whole = types.ResponseResource.model_validate(response)
    assert whole.output
    assert whole.status in ("completed", "incomplete")
    assert whole.usage is not None
    return whole


def ask(**body: Any) -> Any:
    """A whole response."""
    return read(post(**{"max_output_tokens": 30, **body}).json())


def stream(**body: Any) -> tuple[list[str], list[dict[str, Any]]]:
    """The types of a stream's events, and the events."""
    answer = post(**{"max_output_tokens": 30, **body, "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in answer.text.split("\n") if line.startswith("data: ")]
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
    for event in events:
        EVENTS.validate_python(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    read(events[-1]["response"])
    return [event["type"] for event in events], events


def said(role: str, content: Any) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": content}


# text, whole and streamed; roles; turns that are sent
assert ask(input=[said("user", "Say hello in exactly 3 words.")]).output[0].type == "message"
kinds, _ = stream(input=[said("user", "Count from 1 to 5.")])
assert kinds[:2] == ["response.created", "response.in_progress"]
assert "response.output_text.delta" in kinds
ask(input=[said("system", "You are a pirate."), said("user", "Say hello.")])
ask(input=[said("user", "My name is Alice."), said("assistant", "Hello Alice!"), said("user", "What is my name?")])
ask(
    input=[said("user", [{"type": "input_text", "text": "What is my name?"}])], include=["message.output_text.logprobs"]
)

# turns that are kept
first = ask(input="Remember this code word: papaya.")
assert ask(input="Which code word?", previous_response_id=first.id).previous_response_id == first.id

# tools, whole and streamed, and the way back
must = {"tools": [TOOL], "tool_choice": {"type": "function", "name": "get_weather"}, "max_output_tokens": 200}
called = ask(input="How warm is it in San Francisco?", **must)
(call,) = [item for item in called.output if item.type == "function_call"]
result = {"type": "function_call_output", "call_id": call.call_id, "output": "64 degrees and clear"}
assert ask(input=[result], previous_response_id=called.id).output[0].type == "message"
kinds, events = stream(input="How warm is it in San Francisco?", **must)
assert {"response.function_call_arguments.delta", "response.function_call_arguments.done"} <= set(kinds)
for kind in ("response.output_item.added", "response.output_item.done"):
    assert any(event["type"] == kind and event["item"]["type"] == "function_call" for event in events)

# a conversation becomes a summary
compacted = types.CompactResource.model_validate(post("/compact", input="Hello.", max_output_tokens=20).json())
assert compacted.output[0].type == "compaction"
