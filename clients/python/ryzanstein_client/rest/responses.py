"""Responses over REST: chats that the server remembers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ryzanstein_client.options import ResponseFormat, ResponseOptions
from ryzanstein_client.rest import requests
from ryzanstein_client.rest.answers import read_deleted
from ryzanstein_client.rest.requests import Request, StreamRequest, get, get_page, path_of, post, post_stream
from ryzanstein_client.rest.response_answers import ResponseReader, read_count, read_input, read_response
from ryzanstein_client.results import Page, Response
from ryzanstein_client.settings import Message, Settings

_OF_PROMPT = frozenset(
    {
        "input", "model", "instructions", "previous_response_id", "tools", "tool_choice", "parallel_tool_calls", "text",
        "reasoning", "truncation", "chat_template_kwargs",
    }
)  # fmt: skip


def create(settings: Settings, turns: str | Sequence[Message], options: ResponseOptions) -> Request[Response]:
    """POST /v1/responses."""
    return post("/v1/responses", response_body(settings, turns, options), read_response)


def stream(settings: Settings, turns: str | Sequence[Message], options: ResponseOptions) -> StreamRequest:
    """POST /v1/responses, streamed."""
    body = response_body(settings, turns, options) | {"stream": True}
    return post_stream("/v1/responses", body, ResponseReader)


def count(settings: Settings, turns: str | Sequence[Message], options: ResponseOptions) -> Request[int]:
    """POST /v1/responses/input_tokens. Options that do not change the prompt are not its business."""
    body = response_body(settings, turns, options)
    of_prompt = {name: value for name, value in body.items() if name in _OF_PROMPT}
    return post("/v1/responses/input_tokens", of_prompt, read_count)


def kept(response_id: str) -> Request[Response]:
    """GET /v1/responses/{id}."""
    return get(path_of("/v1/responses", response_id), read_response)


def given(response_id: str, after: str | None, limit: int | None) -> Request[Page[Message]]:
    """GET /v1/responses/{id}/input_items."""
    query = {"after": after, "limit": limit, "order": "asc"}
    return get_page(f"{path_of('/v1/responses', response_id)}/input_items", query, read_input)


def delete(response_id: str) -> Request[bool]:
    """DELETE /v1/responses/{id}."""
    return requests.delete(path_of("/v1/responses", response_id), read_deleted)


def response_body(settings: Settings, turns: str | Sequence[Message], options: ResponseOptions) -> dict[str, Any]:
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
    return {"input": turns if isinstance(turns, str) else list(_items(turns)), **fields}


def _items(messages: Sequence[Message]) -> Iterator[dict[str, Any]]:
    for message in messages:
        if message.role == "tool":
            name = {"name": message.name} if message.name else {}
            output = {"call_id": message.tool_call_id, "output": message.content}
            yield {"type": "function_call_output", **output, **name}
            continue
        if message.name:
            raise ValueError(f"messages of responses have no name, got {message.name!r}")
        if message.reasoning:
            yield {"type": "reasoning", "content": [{"type": "reasoning_text", "text": message.reasoning}]}
        if message.content or not (message.tool_calls or message.reasoning):
            yield {"type": "message", "role": message.role, "content": message.content}
        for call in message.tool_calls:
            yield {"type": "function_call", "call_id": call.id, "name": call.name, "arguments": call.arguments}


def _format(form: ResponseFormat) -> dict[str, Any]:
    return {"type": form["type"], **({"name": "answer"} | form["json_schema"] if "json_schema" in form else {})}
