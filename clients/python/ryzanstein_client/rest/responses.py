"""Responses over REST: chats that the server remembers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from msgspec import Struct

from ryzanstein_client.options import ResponseFormat, ResponseOptions
from ryzanstein_client.rest import wire
from ryzanstein_client.rest.answers import item_usage, reader_of
from ryzanstein_client.rest.requests import Request, get, path_of, post
from ryzanstein_client.results import Response, ToolCall
from ryzanstein_client.settings import Message, Settings


class _Text(Struct):
    text: str = ""


class _Item(Struct):
    type: str
    content: list[_Text] | None = None  # of messages and reasoning
    call_id: str = ""  # of calls, as the next two
    name: str = ""
    arguments: str = ""


class _Incomplete(Struct):
    reason: str = ""


class _Response(Struct):
    id: str
    status: str
    output: list[_Item]
    store: bool
    model: str = ""
    usage: wire.ItemUsage | None = None
    incomplete_details: _Incomplete | None = None


class _Deleted(Struct):
    deleted: bool


def create(settings: Settings, said: str | Sequence[Message], options: ResponseOptions) -> Request[Response]:
    """POST /v1/responses."""
    return post("/v1/responses", response_body(settings, said, options), read_response)


def kept(response_id: str) -> Request[Response]:
    """GET /v1/responses/{id}."""
    return get(path_of("/v1/responses", response_id), read_response)


def delete(response_id: str) -> Request[bool]:
    """DELETE /v1/responses/{id}."""
    return Request("DELETE", path_of("/v1/responses", response_id), b"", lambda data: _deleted(data).deleted)


def response_body(settings: Settings, said: str | Sequence[Message], options: ResponseOptions) -> dict[str, Any]:
    """The body of a response; raises TypeError for an option that responses do not have."""
    fields = settings.generation_fields(options, ResponseOptions)
    if "max_tokens" in fields:
        fields["max_output_tokens"] = fields.pop("max_tokens")
    if "logprobs" in fields:
        fields["top_logprobs"], fields["include"] = fields.pop("logprobs"), ["message.output_text.logprobs"]
    if "tools" in fields:
        fields["tools"] = [{"type": "function", **tool} for tool in fields["tools"]]
    if fields.get("tool_choice", "auto") not in ("auto", "none", "required"):
        fields["tool_choice"] = {"type": "function", "name": fields["tool_choice"]}
    if "reasoning_effort" in fields:
        fields["reasoning"] = {"effort": fields.pop("reasoning_effort")}
    if "response_format" in fields:
        fields["text"] = {"format": _format(fields.pop("response_format"))}
    return {"input": said if isinstance(said, str) else list(_items(said)), **fields}


def _items(messages: Sequence[Message]) -> Iterator[dict[str, Any]]:
    for message in messages:
        if message.role == "tool":
            yield {"type": "function_call_output", "call_id": message.tool_call_id, "output": message.content}
            continue
        if message.content or not message.tool_calls:
            yield {"type": "message", "role": message.role, "content": message.content}
        for call in message.tool_calls:
            yield {"type": "function_call", "call_id": call.id, "name": call.name, "arguments": call.arguments}


def _format(asked: ResponseFormat) -> dict[str, Any]:
    return {"type": asked["type"], **({"name": "answer"} | asked["json_schema"] if "json_schema" in asked else {})}


def read_response(data: bytes) -> Response:
    """A response."""
    found = _response(data)
    return Response(
        id=found.id,
        text=_joined(found, "message"),
        status=found.status,
        usage=item_usage(found.usage),
        stored=found.store,
        model=found.model,
        reasoning=_joined(found, "reasoning"),
        tool_calls=tuple(
            ToolCall(item.call_id, item.name, item.arguments) for item in found.output if item.type == "function_call"
        ),
        incomplete_reason=found.incomplete_details.reason if found.incomplete_details else "",
    )


def _joined(found: _Response, kind: str) -> str:
    return "".join(part.text for item in found.output if item.type == kind for part in item.content or ())


_response = reader_of(_Response)
_deleted = reader_of(_Deleted)
