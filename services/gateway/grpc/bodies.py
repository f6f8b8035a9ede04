"""Converts gRPC messages to REST bodies, which validate them."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet
from ryzanstein.v1 import inference_pb2

from services.common.floats import as_written
from services.gateway.api.decode import explain
from services.gateway.api.ignored import Ignored
from services.gateway.api.schema import ChatBody, CompletionBody
from services.gateway.errors import invalid

T = TypeVar("T", bound=msgspec.Struct)

_MAX_ENTRIES = 1024  # in one option: logit_bias, stop_token_ids


def completion_body(
    request: inference_pb2.GenerateRequest, prompt: str | list[int], ignored: Ignored
) -> CompletionBody:
    """The body of a completion; raises :class:`ApiError`."""
    fields: dict[str, Any] = {"model": request.model, "prompt": prompt, "echo": request.echo}
    for name in ("prompt_logprobs", "add_special_tokens"):
        if request.HasField(name):
            fields[name] = getattr(request, name)
    check_known(request, ignored)
    return _body(request, fields, CompletionBody)


def chat_body(request: inference_pb2.ChatRequest, ignored: Ignored) -> ChatBody:
    """The body of a chat; raises :class:`ApiError`."""
    fields: dict[str, Any] = {"model": request.model, "messages": list(map(_message, request.messages))}
    if request.tools:
        fields["tools"] = [{"function": _function(tool)} for tool in request.tools]
    if request.tool_choice in ("none", "auto", "required"):
        fields["tool_choice"] = request.tool_choice
    elif request.tool_choice:
        fields["tool_choice"] = {"function": {"name": request.tool_choice}}
    for name in ("parallel_tool_calls", "add_generation_prompt"):
        if request.HasField(name):
            fields[name] = getattr(request, name)
    if request.reasoning_effort:
        fields["reasoning_effort"] = request.reasoning_effort
    if request.chat_template_kwargs:
        fields["chat_template_kwargs"] = _json(request.chat_template_kwargs, "chat_template_kwargs")
    fields["continue_final_message"] = request.continue_final_message
    if request.options.HasField("logprobs"):  # chat has two fields for it
        fields |= {"logprobs": True, "top_logprobs": request.options.logprobs}
    check_known(request, ignored)
    return _body(request, fields, ChatBody)


def _message(turn: inference_pb2.ChatMessage) -> dict[str, Any]:
    given = {"tool_call_id": turn.tool_call_id, "name": turn.name, "reasoning_content": turn.reasoning}
    message: dict[str, Any] = {"role": turn.role, "content": turn.content}
    message |= {name: value for name, value in given.items() if value}
    if turn.tool_calls:
        message["tool_calls"] = [
            {"id": call.id, "function": {"name": call.name, "arguments": call.arguments}} for call in turn.tool_calls
        ]
    return message


def _function(tool: inference_pb2.Tool) -> dict[str, Any]:
    parameters = _json(tool.parameters, "tools", f"`parameters` of `{tool.name}`") if tool.parameters else None
    return {"name": tool.name, "description": tool.description, "parameters": parameters, "strict": tool.strict}


def _json(text: str, param: str, name: str | None = None) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise invalid(f"{name or f'`{param}`'} is not JSON: {error}", param, "invalid_value") from error


def _body(
    request: inference_pb2.GenerateRequest | inference_pb2.ChatRequest, fields: dict[str, Any], kind: type[T]
) -> T:
    """Validate the values like a REST body; raises :class:`ApiError`."""
    try:
        return msgspec.convert({**_options(request.options), **fields}, kind)
    except msgspec.ValidationError as error:
        raise explain(error, kind) from error


def _options(options: inference_pb2.GenerationOptions) -> dict[str, Any]:
    given = _fields(options)
    if "seed" in given:
        given["seed"] -= (given["seed"] >> 63) << 64  # REST seeds are signed; the bits are the same
    if given.pop("include_workers", False):
        given["stream_options"] = {"include_workers": True}
    if "prediction" in given:
        given["prediction"] = {"type": "content", "content": given["prediction"]}
    schema = options.response_format.json_schema.schema
    if schema:
        given["response_format"]["json_schema"]["schema"] = _json(schema, "response_format.json_schema.schema")
    return given


def _fields(message: Message) -> dict[str, Any]:
    """The fields that are set, by name; raises :class:`ApiError` for lists of more than `_MAX_ENTRIES`."""
    for descriptor, value in message.ListFields():
        if descriptor.is_repeated and len(value) > _MAX_ENTRIES:
            name = descriptor.name
            raise invalid(f"`{name}` may hold at most {_MAX_ENTRIES} entries, got {len(value)}.", name)
    return {field.name: _value(field, value) for field, value in message.ListFields()}


def _value(field: FieldDescriptor, value: Any) -> Any:
    if field.message_type is None:
        if field.type == FieldDescriptor.TYPE_FLOAT:
            return as_written(value)
        return list(value) if field.is_repeated else value
    return dict(value) if field.message_type.GetOptions().map_entry else _fields(value)


def check_known(message: Message, ignored: Ignored) -> None:
    """Leave out fields of a newer contract, or refuse them; raises :class:`ApiError`."""
    unknown = UnknownFieldSet(message)
    for number in sorted({unknown[index].field_number for index in range(len(unknown))}):
        if ignored.refuse_fields:
            text = f"Unknown field {number} of {message.DESCRIPTOR.name}: this gateway is older."
            raise invalid(text, code="unknown_field")
        ignored.add(f"{message.DESCRIPTOR.name}.{number}")
    for field, value in message.ListFields():
        if field.message_type is not None and not field.message_type.GetOptions().map_entry:
            for part in value if field.is_repeated else (value,):
                check_known(part, ignored)
