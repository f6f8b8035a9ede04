"""Open Responses: the requests of its compliance test, and every answer and event read by its published types.

Without images, which the bundled model does not take. Answers may also end at the limit of tokens.
"""

import base64
import json
import sys
from typing import Any

import httpx
from openresponses_types import types
from pydantic import TypeAdapter
from websockets.sync.client import ClientConnection, connect

URL = f"{sys.argv[1]}/v1/responses"
HEADERS = {"OpenResponses-Version": "latest"}
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


PDF = b"""%PDF-1.4
1 0 obj
<< /Type /Catalog /Pages 2 0 R >>
endobj
2 0 obj
<< /Type /Pages /Kids [3 0 R] /Count 1 >>
endobj
3 0 obj
<< /Type /Page /Parent 2 0 R /MediaBox [0 0 300 144] /Contents 4 0 R /Resources << /Font << /F1 5 0 R >> >> >>
endobj
4 0 obj
<< /Length 53 >>
stream
BT /F1 12 Tf 72 72 Td (Title: The blue heron) Tj ET
endstream
endobj
5 0 obj
<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>
endobj
trailer
<< /Root 1 0 R >>
startxref
0
%%EOF"""


def post(path: str = "", **body: Any) -> httpx.Response:
    """An answer that is no error."""
    types.CreateResponseBody.model_validate(body)
    answer = httpx.post(URL + path, json={"model": MODEL, **body}, headers=HEADERS, timeout=120)
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
    assert lines.pop() == "data: [DONE]"
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
past = [{**said("assistant", text), "phase": phase} for text, phase in (("So.", "commentary"), ("4.", "final_answer"))]
ask(input=[*past, said("user", "Repeat the number.")])
file = {
    "type": "input_file",
    "filename": "heron.pdf",
    "file_data": f"data:application/pdf;base64,{base64.b64encode(PDF).decode()}",
}
ask(input=[said("user", [{"type": "input_text", "text": "The title alone."}, file])])
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
nameless = httpx.post(f"{URL}/compact", json={"input": "Hello."}, timeout=120)
assert nameless.status_code == 400, nameless.text


def turn(socket: ClientConnection, **body: Any) -> dict[str, Any]:
    """The last event of a response over a WebSocket: the whole response, or an error."""
    created = {"type": "response.create", "model": MODEL, "store": False, "max_output_tokens": 20, **body}
    socket.send(json.dumps(created))
    while True:
        event: dict[str, Any] = json.loads(socket.recv(timeout=120))
        if event["type"] == "error":
            return event
        EVENTS.validate_python(event)
        if event["type"] in ("response.completed", "response.incomplete"):
            read(event["response"])
            return event


def is_lost(event: dict[str, Any]) -> bool:
    return (event["status"], event["error"]["code"]) == (400, "previous_response_not_found")


# many responses over one connection, which remembers its turns until one of them fails to go on
SOCKET = f"ws{URL.removeprefix('http')}"
with connect(SOCKET, additional_headers=HEADERS, proxy=None) as socket:
    begun = turn(socket, input="Remember: cobalt.")["response"]["id"]
    turn(socket, input="Which word?", previous_response_id=begun)
    summary = post("/compact", input="Hello.", max_output_tokens=20).json()["output"]
    turn(socket, input=[*summary, said("user", "Go on.")])
    wrong = {"type": "function_call_output", "call_id": "call_missing", "output": "No such call."}
    assert turn(socket, input=[wrong], previous_response_id=begun)["type"] == "error"
    assert is_lost(turn(socket, input="Go on.", previous_response_id=begun))
    lost = turn(socket, input="Remember: copper.")["response"]["id"]
with connect(SOCKET, additional_headers=HEADERS, proxy=None) as socket:
    assert is_lost(turn(socket, input="Go on.", previous_response_id=lost))
    turn(socket, input="Begin anew.")
