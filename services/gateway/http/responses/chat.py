"""From a response's body to the chat that answers it, and errors back into the body's words."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from services.gateway.api import schema as chat
from services.gateway.errors import ApiError, invalid
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
from services.gateway.http.responses.tools import ToolOffer, chosen_tools, flat_name, input_arguments, tools_of

# Longer names first: a regular expression takes the first alternative that fits.
_FIELDS = {
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "messages": "input",
}
_NAMED = re.compile(f"(?P<before>^|`)(?P<field>{'|'.join(map(re.escape, _FIELDS))})(?=[`.\\[]|$)")


def in_own_words(error: ApiError) -> ApiError:
    """An error of a chat, with the names that a response's body has for its fields."""

    def rename(text: str) -> str:
        return _NAMED.sub(lambda found: found["before"] + _FIELDS[found["field"]], text)

    return replace(error, message=rename(error.message), param=error.param and rename(error.param))


def chat_of(body: ResponsesBody, items: Sequence[Item], offer: ToolOffer) -> chat.ChatBody:
    """The chat of a conversation's items; raises :class:`ApiError` (400)."""
    messages = messages_of(items)
    if not messages:
        raise invalid("`input` is empty: at least one item is needed.", "input", "invalid_value")
    if body.instructions is not None:
        messages.insert(0, chat.Message(role="system", content=body.instructions))
    tools, choice = chosen_tools(body, offer)
    return chat.ChatBody(
        messages=messages,
        model=body.model,
        stream=body.stream,
        max_completion_tokens=body.max_output_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        min_p=body.min_p,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        repetition_penalty=body.repetition_penalty,
        seed=body.seed,
        logprobs=body.logprobs,
        top_logprobs=body.top_logprobs if body.logprobs else None,
        tools=tools_of(tools),
        tool_choice=choice,
        parallel_tool_calls=body.parallel_tool_calls,
        response_format=_format(body.text.format if body.text else None),
        reasoning_effort=body.reasoning.effort if body.reasoning else None,
        chat_template_kwargs=body.chat_template_kwargs,
    )


def messages_of(items: Sequence[Item]) -> list[chat.Message]:
    """The messages of a conversation; raises :class:`ApiError` (400) for the output of a call that nobody made."""
    messages: list[chat.Message] = []
    reasoning: list[str] = []
    calls: dict[str, str] = {}
    for item in items:
        match item:
            case MessageItem(role=role, content=content):
                messages.append(chat.Message(role=role, content=_parts(content)))
            case CallItem() | CustomCallItem():
                call = _call(item)
                calls[item.call_id] = call.function.name
                if reasoning or not messages or messages[-1].role != "assistant":
                    messages.append(chat.Message(role="assistant", tool_calls=[]))
                messages[-1].tool_calls = [*(messages[-1].tool_calls or ()), call]
            case CallOutputItem(call_id=call_id, output=output) | CustomOutputItem(call_id=call_id, output=output):
                if call_id not in calls:
                    message = f"`input` has the output of a call `{call_id}` that is not in the conversation."
                    raise invalid(message, "input", "invalid_value")
                tool = chat.Message(role="tool", content=_parts(output), tool_call_id=call_id, name=calls[call_id])
                messages.append(tool)
            case _:
                reasoning += [part.text for part in item.content or item.summary or ()]
                continue
        if reasoning and messages[-1].role == "assistant":
            messages[-1].reasoning_content = "\n".join(reasoning)
        reasoning = []
    return messages


def _call(item: CallItem | CustomCallItem) -> chat.ToolCall:
    arguments = item.arguments if isinstance(item, CallItem) else input_arguments(item.input)
    return chat.ToolCall(id=item.call_id, function=chat.FunctionCall(flat_name(item.namespace, item.name), arguments))


def _parts(content: Content) -> str | list[chat.ContentPart]:
    if isinstance(content, str):
        return content
    return [chat.TextPart(part.text) for part in content]


def _format(asked: TextFormat | None) -> chat.ResponseFormat | None:
    if asked is None or asked.type == "text":
        return None
    if asked.type == "json_object":
        return chat.ResponseFormat(type="json_object")
    if asked.schema is None or asked.name is None:
        missing = "text.format.schema" if asked.schema is None else "text.format.name"
        raise invalid(f"Missing required field `{missing}`.", missing, "missing_field")
    schema = chat.JsonSchemaFormat(asked.name, asked.schema, asked.description, asked.strict)
    return chat.ResponseFormat(type="json_schema", json_schema=schema)
