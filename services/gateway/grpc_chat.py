"""Messages, tools and calls between gRPC's contract and the bodies of REST."""

from __future__ import annotations

from typing import Any

import msgspec
from ryzanstein.v1 import inference_pb2

from services.gateway.errors import invalid
from services.gateway.tools.calls import CallDelta


def chat_fields(request: inference_pb2.ChatRequest) -> dict[str, Any]:
    """A chat's fields as REST has them, but for its options; raises :class:`ApiError`."""
    fields: dict[str, Any] = {"model": request.model, "messages": list(map(_message, request.messages))}
    if request.tools:
        fields["tools"] = [{"function": _function(tool)} for tool in request.tools]
    if request.tool_choice in ("none", "auto", "required"):
        fields["tool_choice"] = request.tool_choice
    elif request.tool_choice:
        fields["tool_choice"] = {"function": {"name": request.tool_choice}}
    if request.HasField("parallel_tool_calls"):
        fields["parallel_tool_calls"] = request.parallel_tool_calls
    return fields


def _message(turn: inference_pb2.ChatMessage) -> dict[str, Any]:
    message: dict[str, Any] = {"role": turn.role, "content": turn.content}
    if turn.tool_call_id:
        message["tool_call_id"] = turn.tool_call_id
    if turn.tool_calls:
        message["tool_calls"] = [
            {"id": call.id, "function": {"name": call.name, "arguments": call.arguments}} for call in turn.tool_calls
        ]
    return message


def _function(tool: inference_pb2.Tool) -> dict[str, Any]:
    try:
        parameters = msgspec.json.decode(tool.parameters) if tool.parameters else None
    except (msgspec.DecodeError, RecursionError) as error:
        raise invalid(f"`parameters` of `{tool.name}` are not JSON: {error}", "tools", "invalid_value") from error
    return {"name": tool.name, "description": tool.description, "parameters": parameters, "strict": tool.strict}


def call_delta(call: CallDelta) -> inference_pb2.ToolCallDelta:
    """A piece of a call."""
    return inference_pb2.ToolCallDelta(
        index=call.index, id=call.id or "", name=call.name or "", arguments=call.arguments
    )
