"""From Anthropic's bodies to a chat's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from services.gateway.api.schema import (
    ChatBody,
    ChosenFunction,
    ChosenTool,
    ContentPart,
    FunctionCall,
    FunctionDefinition,
    JsonSchemaFormat,
    Message,
    ResponseFormat,
    TextPart,
    Tool,
    ToolCall,
)
from services.gateway.errors import ApiError, invalid
from services.gateway.http.messages import schema
from services.gateway.http.messages.tools import read_tools

# Fields of a chat by those that clients of messages have written.
_FIELDS = {
    "stop": "stop_sequences",
    "response_format.json_schema.schema": "output_config.format.schema",
    "continue_final_message": "messages",
}


def chat_of(body: schema.CountBody) -> ChatBody:
    """The chat that a body asks for, with the prompt that both have; raises :class:`ApiError` (400)."""
    messages = _messages(body)
    continued = messages[-1].role == "assistant"
    if messages[-1].tool_calls:
        where = f"messages[{len(body.messages) - 1}]"
        message = f"`{where}` calls tools: their results have to follow, as `tool_result` blocks of a user's message."
        raise invalid(message, where, "invalid_value")
    choice = body.tool_choice
    return ChatBody(
        model=body.model,
        messages=messages,
        add_generation_prompt=not continued,
        continue_final_message=continued,
        chat_template_kwargs=_thinking(body),
        reasoning_effort=body.output_config.effort if body.output_config else None,
        response_format=_format(body),
        tools=[_tool(tool) for tool in read_tools(body).tools],
        tool_choice=_choice(choice),
        parallel_tool_calls=not getattr(choice, "disable_parallel_tool_use", False),
    )


def sampled_chat_of(body: schema.MessagesBody) -> ChatBody:
    """The same, with how tokens are chosen."""
    chat = chat_of(body)
    chat.temperature, chat.top_p, chat.top_k, chat.seed = body.temperature, body.top_p, body.top_k, body.seed
    chat.stop, chat.stream, chat.max_tokens = list(body.stop_sequences or ()), body.stream, body.max_tokens
    return chat


def in_our_words(error: ApiError) -> ApiError:
    """An error about a chat, naming the fields of the body that it was made from."""
    ours = _FIELDS.get(error.param or "")
    if ours is None:
        return error
    return replace(error, message=error.message.replace(f"`{error.param}`", f"`{ours}`"), param=ours)


def _thinking(body: schema.CountBody) -> dict[str, Any] | None:
    """What templates call it: Qwen's and GLM's, DeepSeek's and Granite's."""
    if body.thinking is None:
        return None
    on = not isinstance(body.thinking, schema.ThinkingOff)
    return {"enable_thinking": on, "thinking": on}


def _format(body: schema.CountBody) -> ResponseFormat | None:
    asked = body.output_config.format if body.output_config else None
    if asked and body.output_format:
        message = "Only one of `output_config.format` and `output_format` may be given."
        raise invalid(message, "output_format", "invalid_value")
    asked = asked or body.output_format
    return ResponseFormat(type="json_schema", json_schema=JsonSchemaFormat(schema=asked.schema)) if asked else None


def _tool(tool: schema.CustomTool) -> Tool:
    parameters, strict = tool.input_schema, tool.strict
    return Tool(
        function=FunctionDefinition(name=tool.name, description=tool.description, parameters=parameters, strict=strict)
    )


def _choice(choice: schema.Choice | None) -> Any:
    match choice:
        case schema.OneChoice(name=name):
            return ChosenTool(function=ChosenFunction(name))
        case schema.AnyChoice():
            return "required"
        case schema.NoChoice():
            return "none"
    return None


def _messages(body: schema.CountBody) -> list[Message]:
    """A chat's messages. Turns of the same role that follow each other are one: many templates want them in turn."""
    found = [Message(role="system", content=_content(_texts(body.system, "system")))] if body.system else []
    names: dict[str, str] = {}  # of called tools, by the calls' ids
    for index, turn in enumerate(body.messages):
        where = f"messages[{index}]"
        if isinstance(turn.content, str) or turn.role == "system":
            added = [Message(role=turn.role, content=_content(_texts(turn.content, f"{where}.content")))]
        elif turn.role == "assistant":
            added = [_assistant(turn.content, f"{where}.content", names)]
        else:
            added = _user(turn.content, f"{where}.content", names)
        for message in added:
            if found and message.role == found[-1].role in ("user", "assistant"):
                found[-1] = _joined(found[-1], message)
            else:
                found.append(message)
    return found


def _joined(first: Message, second: Message) -> Message:
    texts = [*first.texts(), *second.texts()]
    thoughts = [message.reasoning_content or "" for message in (first, second)]
    calls = [*(first.tool_calls or ()), *(second.tool_calls or ())]
    return Message(
        role=first.role,
        content=_content([text for text in texts if text]),
        reasoning_content="\n".join(filter(None, thoughts)) or None,
        tool_calls=calls or None,
    )


def _assistant(blocks: Sequence[schema.Block], where: str, names: dict[str, str]) -> Message:
    texts, thoughts, calls = [], [], []
    for index, block in enumerate(blocks):
        match block:
            case schema.TextBlock(text=text):
                texts.append(text)
            case schema.ThinkingBlock(thinking=thinking):
                thoughts.append(thinking)
            case schema.ToolUseBlock(id=call_id, name=name, input=arguments):
                names[call_id] = name
                calls.append(
                    ToolCall(function=FunctionCall(name, _json(arguments, f"{where}[{index}].input")), id=call_id)
                )
            case schema.RedactedThinkingBlock():
                continue  # for its maker's eyes only
            case _:
                raise _misplaced(block, f"{where}[{index}]")
    return Message(
        role="assistant",
        content=_content(texts),
        reasoning_content="\n".join(thoughts) or None,
        tool_calls=calls or None,
    )


def _json(value: dict[str, Any], field: str) -> str:
    try:
        return msgspec.json.encode(value).decode()
    except RecursionError as error:
        raise invalid(f"`{field}` is nested too deeply.", field, "invalid_value") from error


def _user(blocks: Sequence[schema.Block], where: str, names: Mapping[str, str]) -> list[Message]:
    """A message, and one before it for each result of a tool."""
    found: list[Message] = []
    texts: list[str] = []
    for index, block in enumerate(blocks):
        match block:
            case schema.TextBlock(text=text):
                texts.append(text)
            case schema.ToolResultBlock():
                found.append(_result(block, f"{where}[{index}]", names))
            case _:
                raise _misplaced(block, f"{where}[{index}]")
    return [*found, Message(role="user", content=_content(texts))] if texts or not found else found


def _result(block: schema.ToolResultBlock, where: str, names: Mapping[str, str]) -> Message:
    name = names.get(block.tool_use_id)
    if name is None:
        field = f"{where}.tool_use_id"
        message = f"`{field}` is `{block.tool_use_id}`, but no earlier `tool_use` block has this id."
        raise invalid(message, field, "invalid_value")
    first, *others = _texts(block.content or "", f"{where}.content") or [""]
    texts = [f"Error: {first}" if block.is_error else first, *others]
    return Message(role="tool", content=_content(texts), tool_call_id=block.tool_use_id, name=name)


def _content(texts: Sequence[str]) -> str | list[ContentPart]:
    """One text as it is, several as parts: the chat template may keep them apart."""
    return [TextPart(text) for text in texts] if len(texts) > 1 else "".join(texts)


def _texts(content: str | Sequence[schema.Block], where: str) -> list[str]:
    if isinstance(content, str):
        return [content]
    texts = []
    for index, block in enumerate(content):
        if not isinstance(block, schema.TextBlock):
            raise _misplaced(block, f"{where}[{index}]")
        texts.append(block.text)
    return texts


def _misplaced(block: schema.Block, where: str) -> ApiError:
    kind = block.__struct_config__.tag
    if isinstance(block, schema.ImageBlock | schema.DocumentBlock | schema.SearchResultBlock):
        message = f"`{where}` is of the type `{kind}`, which is not supported: models here read text only."
        return invalid(message, where, "unsupported_field")
    message = f"`{where}` may not be of the type `{kind}` in this message."
    return invalid(message, where, "invalid_value")
