"""From a response's body to the chat that answers it, and errors back into the body's words."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from services.gateway.api import schema as chat
from services.gateway.errors import ApiError, invalid
from services.gateway.http.responses.reading import Mode, read_choice, read_tools
from services.gateway.http.responses.schema import (
    AllowedTools,
    CallItem,
    CallOutputItem,
    Content,
    FunctionChoice,
    FunctionTool,
    Item,
    MessageItem,
    ResponsesBody,
    TextFormat,
)

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


def chat_of(body: ResponsesBody, items: Sequence[Item]) -> chat.ChatBody:
    """The chat of a conversation's items; raises :class:`ApiError` (400)."""
    messages = messages_of(items)
    if not messages:
        raise invalid("`input` is empty: at least one item is needed.", "input", "invalid_value")
    if body.instructions is not None:
        messages.insert(0, chat.Message(role="system", content=body.instructions))
    tools, choice = read_tools(body), read_choice(body)
    if isinstance(choice, AllowedTools):
        tools, choice = _allowed(tools, choice), choice.mode
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
        tools=[chat.Tool(function=_function(tool)) for tool in tools] or None,
        tool_choice=_choice(choice),
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
            case CallItem(call_id=call_id, name=name, arguments=arguments):
                calls[call_id] = name
                call = chat.ToolCall(id=call_id, function=chat.FunctionCall(name, arguments))
                if reasoning or not messages or messages[-1].role != "assistant":
                    messages.append(chat.Message(role="assistant", tool_calls=[]))
                messages[-1].tool_calls = [*(messages[-1].tool_calls or ()), call]
            case CallOutputItem(call_id=call_id, output=output):
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


def _parts(content: Content) -> str | list[chat.TextPart]:
    if isinstance(content, str):
        return content
    return [chat.TextPart("text", part.text) for part in content]


def _function(tool: FunctionTool) -> chat.FunctionDefinition:
    return chat.FunctionDefinition(
        name=tool.name, description=tool.description, parameters=tool.parameters, strict=tool.strict
    )


def _allowed(tools: Sequence[FunctionTool], choice: AllowedTools) -> list[FunctionTool]:
    names = {tool.name for tool in choice.tools}
    if unknown := names - {tool.name for tool in tools}:
        message = f"`tool_choice.tools` names `{min(unknown)}`, which is not among `tools`."
        raise invalid(message, "tool_choice.tools", "invalid_value")
    return [tool for tool in tools if tool.name in names]


def _choice(choice: Mode | FunctionChoice | None) -> chat.ChosenTool | Mode | None:
    if isinstance(choice, FunctionChoice):
        return chat.ChosenTool(function=chat.ChosenFunction(choice.name))
    return choice


def _format(asked: TextFormat | None) -> chat.ResponseFormat | None:
    if asked is None or asked.type == "text":
        return None
    if asked.type == "json_object":
        return chat.ResponseFormat("json_object")
    if asked.schema is None or asked.name is None:
        missing = "text.format.schema" if asked.schema is None else "text.format.name"
        raise invalid(f"Missing required field `{missing}`.", missing, "missing_field")
    schema = chat.JsonSchemaFormat(asked.name, asked.schema, asked.description, asked.strict)
    return chat.ResponseFormat("json_schema", schema)
