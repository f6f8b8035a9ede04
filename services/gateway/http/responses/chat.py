"""From a response's body to the chat that answers it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from services.gateway.api.chat import Call, ChatRequest, FieldNames, Turn
from services.gateway.api.options import JsonSchemaFormat, ResponseFormat, TextOptions
from services.gateway.errors import invalid
from services.gateway.http.responses.schema import (
    CallItem,
    CallOutputItem,
    Content,
    CustomCallItem,
    CustomOutputItem,
    Item,
    MessageItem,
    ResponsesBody,
    TextFormat,
)
from services.gateway.http.responses.tools import ToolOffer, flat_name, input_arguments, offered_tools

NAMES = FieldNames(messages="input", format="text.format", schema="text.format.schema")


def chat_of(body: ResponsesBody, items: Sequence[Item], offer: ToolOffer) -> ChatRequest:
    """The chat of a conversation's items; raises :class:`ApiError` (400)."""
    turns = turns_of(items)
    if not turns:
        raise invalid("`input` is empty: at least one item is needed.", "input", "invalid_value")
    if body.instructions is not None:
        turns.insert(0, Turn("system", [body.instructions]))
    return ChatRequest(
        turns=turns,
        names=NAMES,
        variables=_variables(body),
        tools=offered_tools(body, offer),
        options=_options(body),
        max_tokens=body.max_output_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )


def _variables(body: ResponsesBody) -> dict[str, Any]:
    effort = body.reasoning.effort if body.reasoning else None
    return ({} if effort is None else {"reasoning_effort": effort}) | (body.chat_template_kwargs or {})


def _options(body: ResponsesBody) -> TextOptions:
    return TextOptions(
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        min_p=body.min_p,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        repetition_penalty=body.repetition_penalty,
        seed=body.seed,
        response_format=_format(body.text.format if body.text else None),
    )


def turns_of(items: Sequence[Item]) -> list[Turn]:
    """The turns of a conversation; raises :class:`ApiError` (400) for the output of a call that it does not hold."""
    turns: list[Turn] = []
    reasoning: list[str] = []
    calls: dict[str, str] = {}
    for item in items:
        match item:
            case MessageItem(role=role, content=content):
                turns.append(Turn(role, _texts(content)))
            case CallItem() | CustomCallItem():
                call = _call(item)
                calls[item.call_id] = call.name
                if reasoning or not turns or turns[-1].role != "assistant":
                    turns.append(Turn("assistant", [""]))
                turns[-1].calls.append(call)
            case CallOutputItem(call_id=call_id, output=output) | CustomOutputItem(call_id=call_id, output=output):
                if call_id not in calls:
                    message = f"`input` has the output of a call `{call_id}` that is not in the conversation."
                    raise invalid(message, "input", "invalid_value")
                turns.append(Turn("tool", _texts(output), tool_call_id=call_id, name=calls[call_id]))
            case _:
                reasoning += [part.text for part in item.content or item.summary or ()]
                continue
        if reasoning and turns[-1].role == "assistant":
            turns[-1].reasoning_content = "\n".join(reasoning)
        reasoning = []
    return turns


def _call(item: CallItem | CustomCallItem) -> Call:
    arguments = (item.arguments or "{}") if isinstance(item, CallItem) else input_arguments(item.input)
    return Call(flat_name(item.namespace, item.name), arguments, item.call_id)


def _texts(content: Content) -> list[str]:
    return [content] if isinstance(content, str) else [part.text for part in content]


def _format(asked: TextFormat | None) -> ResponseFormat | None:
    if asked is None or asked.type == "text":
        return None
    if asked.type == "json_object":
        return ResponseFormat(type="json_object")
    if asked.schema is None or asked.name is None:
        missing = "text.format.schema" if asked.schema is None else "text.format.name"
        raise invalid(f"Missing required field `{missing}`.", missing, "missing_field")
    schema = JsonSchemaFormat(asked.name, asked.schema, asked.description, asked.strict)
    return ResponseFormat(type="json_schema", json_schema=schema)
