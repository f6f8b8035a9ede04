"""From Anthropic's bodies to chats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from services.gateway.api.chat import Call, ChatRequest, FieldNames, OfferedTools, Turn
from services.gateway.api.decode import TEXT_ONLY
from services.gateway.api.ignored import Ignored
from services.gateway.api.options import FunctionDefinition, JsonSchemaFormat, ResponseFormat, TextOptions
from services.gateway.errors import ApiError, invalid
from services.gateway.http.messages import schema
from services.gateway.http.messages.tools import read_tools

NAMES = FieldNames(continued="messages", stop="stop_sequences")


def chat_of(body: schema.CountBody, ignored: Ignored) -> ChatRequest:
    """The chat that a body asks for, with the prompt that both have; raises :class:`ApiError` (400)."""
    turns, tools = _turns(body), read_tools(body, ignored)
    continued = turns[-1].role == "assistant"
    if turns[-1].calls:
        where = f"messages[{len(body.messages) - 1}]"
        message = f"`{where}` calls tools: their results have to follow, as `tool_result` blocks of a user's message."
        raise invalid(message, where, "invalid_value")
    form = "output_config.format" if body.output_format is None else "output_format"
    return ChatRequest(
        turns=turns,
        names=replace(NAMES, format=form, schema=f"{form}.schema"),
        add_generation_prompt=not continued,
        continue_final_message=continued,
        variables=_variables(body),
        tools=OfferedTools(
            [_function(tool) for tool in tools],
            _choice(body.tool_choice),
            not getattr(body.tool_choice, "disable_parallel_tool_use", False),
        ),
        options=TextOptions(response_format=_format(body)),
    )


def sampled_chat_of(body: schema.MessagesBody, ignored: Ignored) -> ChatRequest:
    """Return the chat with its sampling options."""
    chat = chat_of(body, ignored)
    options = TextOptions(
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        seed=body.seed,
        stop=list(body.stop_sequences or ()),
        response_format=chat.options.response_format,
    )
    return replace(chat, options=options, max_tokens=body.max_tokens)


def _variables(body: schema.CountBody) -> dict[str, Any]:
    effort = body.output_config.effort if body.output_config else None
    return ({} if effort is None else {"reasoning_effort": effort}) | (_thinking(body) or {})


def _thinking(body: schema.CountBody) -> dict[str, Any] | None:
    """Return the switch under the names of the templates: Qwen's and GLM's, DeepSeek's and Granite's."""
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


def _function(tool: schema.CustomTool) -> FunctionDefinition:
    return FunctionDefinition(
        name=tool.name, description=tool.description, parameters=tool.input_schema, strict=tool.strict
    )


def _choice(choice: schema.Choice | None) -> str:
    match choice:
        case schema.OneChoice(name=name):
            return name
        case schema.AnyChoice():
            return "required"
        case schema.NoChoice():
            return "none"
    return "auto"


def _turns(body: schema.CountBody) -> list[Turn]:
    """A chat's turns. Those of the same role that follow each other are one: many templates want them in turn."""
    found = [Turn("system", _texts(body.system, "system"))] if body.system else []
    names: dict[str, str] = {}  # of called tools, by the calls' ids
    for index, turn in enumerate(body.messages):
        where = f"messages[{index}]"
        if isinstance(turn.content, str) or turn.role == "system":
            added = [Turn(turn.role, _texts(turn.content, f"{where}.content"))]
        elif turn.role == "assistant":
            added = [_assistant(turn.content, f"{where}.content", names)]
        else:
            added = _user(turn.content, f"{where}.content", names)
        for one in added:
            if found and one.role == found[-1].role in ("user", "assistant"):
                found[-1] = _joined(found[-1], one)
            else:
                found.append(one)
    return found


def _joined(first: Turn, second: Turn) -> Turn:
    thoughts = [turn.reasoning_content or "" for turn in (first, second)]
    return Turn(
        first.role,
        [text for text in (*first.texts, *second.texts) if text],
        reasoning_content="\n".join(filter(None, thoughts)) or None,
        calls=[*first.calls, *second.calls],
    )


def _assistant(blocks: Sequence[schema.Block], where: str, names: dict[str, str]) -> Turn:
    texts, thoughts, calls = [], [], []
    for index, block in enumerate(blocks):
        match block:
            case schema.TextBlock(text=text):
                texts.append(text)
            case schema.ThinkingBlock(thinking=thinking):
                thoughts.append(thinking)
            case schema.ToolUseBlock(id=call_id, name=name, input=arguments):
                names[call_id] = name
                calls.append(Call(name, _json(arguments, f"{where}[{index}].input"), call_id))
            case schema.RedactedThinkingBlock():
                continue  # for its maker's eyes only
            case _:
                raise _misplaced(block, f"{where}[{index}]")
    return Turn("assistant", texts, reasoning_content="\n".join(thoughts) or None, calls=calls)


def _json(value: dict[str, Any], field: str) -> str:
    try:
        return msgspec.json.encode(value).decode()
    except RecursionError as error:
        raise invalid(f"`{field}` is nested too deeply.", field, "invalid_value") from error


def _user(blocks: Sequence[schema.Block], where: str, names: Mapping[str, str]) -> list[Turn]:
    """A turn, and one before it for each result of a tool."""
    found: list[Turn] = []
    texts: list[str] = []
    for index, block in enumerate(blocks):
        match block:
            case schema.TextBlock(text=text):
                texts.append(text)
            case schema.ToolResultBlock():
                found.append(_result(block, f"{where}[{index}]", names))
            case _:
                raise _misplaced(block, f"{where}[{index}]")
    return [*found, Turn("user", texts)] if texts or not found else found


def _result(block: schema.ToolResultBlock, where: str, names: Mapping[str, str]) -> Turn:
    name = names.get(block.tool_use_id)
    if name is None:
        field = f"{where}.tool_use_id"
        message = f"`{field}` is `{block.tool_use_id}`, but no earlier `tool_use` block has this id."
        raise invalid(message, field, "invalid_value")
    first, *others = _texts(block.content or "", f"{where}.content") or [""]
    texts = [f"Error: {first}" if block.is_error else first, *others]
    return Turn("tool", texts, tool_call_id=block.tool_use_id, name=name)


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
        message = f"`{where}` is of the type `{kind}`, which is not supported: {TEXT_ONLY}."
        return invalid(message, where, "unsupported_field")
    message = f"`{where}` may not be of the type `{kind}` in this message."
    return invalid(message, where, "invalid_value")
