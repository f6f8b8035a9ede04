"""From Anthropic's bodies to chats."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from services.gateway.api.chat import Call, ChatRequest, FieldNames, OfferedTools, Part, Turn, thinking_variables
from services.gateway.api.files import given_file
from services.gateway.api.ignored import Ignored, Unserved
from services.gateway.api.images import given_image
from services.gateway.api.options import FunctionDefinition, JsonSchemaFormat, ResponseFormat, TextOptions
from services.gateway.api.parts import (
    is_role,
    json_text,
    media_reason,
    own_text,
    part_refusal,
    stand_in,
    text_of,
)
from services.gateway.errors import ApiError, invalid
from services.gateway.http.messages import schema
from services.gateway.http.messages.tools import read_tools
from services.gateway.text.codec import ServedModel

_SERVER_CALLS = ("server_tool_use", "mcp_tool_use")
_INLINE_BLOCKS = 500  # translated within a millisecond
_INDEX = re.compile(r"\[\d+\]")
Body = TypeVar("Body", bound=schema.CountBody)
NAMES = FieldNames(continued="messages", stop="stop_sequences")


async def translated(
    translate: Callable[[Body, Ignored], ChatRequest], body: Body, model: ServedModel, ignored: Ignored
) -> ChatRequest:
    """The chat of a body; raises :class:`ApiError` (400), for too many blocks before any is looked at."""
    for field, contents in (
        ("system", [body.system or ""]),
        ("messages", [turn.content or "" for turn in body.messages]),
    ):
        count = sum(1 if isinstance(content, str) else max(1, len(content)) for content in contents)
        if count > model.max_len:  # a block costs a token at the least
            message = f"`{field}` may hold at most {model.max_len} blocks for this model, got {count}."
            raise invalid(message, field, "invalid_value")
    return await model.off_loop(count, partial(translate, body, ignored), _INLINE_BLOCKS)


def chat_of(body: schema.CountBody, ignored: Ignored) -> ChatRequest:
    """The chat that a body asks for, with the prompt that both have; raises :class:`ApiError` (400)."""
    turns, tools = _turns(body, ignored), read_tools(body, ignored)
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
        attention=body.attention,
        stop=list(body.stop_sequences or ()),
        response_format=chat.options.response_format,
    )
    return replace(chat, options=options, max_tokens=body.max_tokens)


def _variables(body: schema.CountBody) -> dict[str, Any]:
    effort = body.output_config.effort if body.output_config else None
    variables: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort}
    if body.thinking is not None:
        variables |= thinking_variables(on=not isinstance(body.thinking, schema.ThinkingOff))
    return variables


def _format(body: schema.CountBody) -> ResponseFormat | None:
    form = body.output_config.format if body.output_config else None
    if form and body.output_format:
        message = "Only one of `output_config.format` and `output_format` may be given."
        raise invalid(message, "output_format", "invalid_value")
    form = form or body.output_format
    return ResponseFormat(type="json_schema", json_schema=JsonSchemaFormat(schema=form.schema)) if form else None


def _function(tool: schema.ClientTool) -> FunctionDefinition:
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


def _turns(body: schema.CountBody, ignored: Ignored) -> list[Turn]:
    """A chat's turns. Those of the same role that follow each other are one: many templates want them in turn."""
    turns = [Turn("system", _parts(body.system, _Reader("system", ignored, new=True)))] if body.system else []
    names: dict[str, str] = {}  # names of called tools, by the calls' ids
    last = len(body.messages) - 1
    for index, turn in enumerate(body.messages):
        if not is_role(turn.role, schema.ROLES, f"messages[{index}].role", ignored, new=index == last):
            continue
        reader = _Reader(f"messages[{index}].content", ignored, new=index == last)
        if turn.content is None or isinstance(turn.content, str) or turn.role in ("system", "developer"):
            added = [Turn(turn.role, _parts(turn.content or "", reader))]
        elif turn.role == "assistant":
            added = _assistant(turn.content, reader, names)
        else:
            added = _user(turn.content, reader, names)
        for one in added:
            if turns and one.role == turns[-1].role in ("user", "assistant"):
                turns[-1] = _joined(turns[-1], one)
            else:
                turns.append(one)
    return turns


def _joined(first: Turn, second: Turn) -> Turn:
    thoughts = [turn.reasoning_content or "" for turn in (first, second)]
    return Turn(
        first.role,
        [part for part in (*first.parts, *second.parts) if part],
        reasoning_content="\n".join(filter(None, thoughts)) or None,
        calls=[*first.calls, *second.calls],
    )


class _Reader(Struct, frozen=True):
    """Reads the blocks of one list that are no texts by their type."""

    where: str  # the list
    ignored: Ignored
    new: bool  # the blocks are the user's own, and not a history
    result: bool = False  # the blocks are a tool's result

    def read(self, block: Unserved, index: int) -> Part:
        """An image, a file, a block's text, or what stands in for it; raises :class:`ApiError` (400) for a new one."""
        place = f"{_INDEX.sub('[]', self.where)}[]"
        refused = self.refusal(block, index) if self.new else None
        if image := given_image(block, f"{self.where}[{index}]", place, refused):
            return image
        if file := given_file(block, f"{self.where}[{index}]", place, new=self.new):
            return file
        if refused and own_text(block) is None:
            raise refused
        return stand_in(block, place, self.ignored, result=self.result)

    def leave_out(self, block: schema.Block, index: int) -> None:
        """Leave out a block that may not be in this list; raises :class:`ApiError` (400) for a new one."""
        kind = str(block.__struct_config__.tag)
        if self.new:
            raise self.misplaced(kind, index)
        self.ignored.add(f"{_INDEX.sub('[]', self.where)}[].type={kind}")

    def refusal(self, block: Unserved, index: int) -> ApiError:
        """The error (400) for a new block that is not served, or malformed."""
        if block.fault:
            return part_refusal(block, (), f"{self.where}[{index}]")
        return self.misplaced(block.kind, index)

    def misplaced(self, kind: str, index: int) -> ApiError:
        """The error (400) for a block that may not be in this list."""
        where = f"{self.where}[{index}]"
        if reason := media_reason(kind):
            message = f"`{where}` is of the type `{kind}`, which is not supported: {reason}."
            return invalid(message, where, "unsupported_field")
        return invalid(f"`{where}` may not be of the type `{kind}` in this message.", where, "invalid_value")


def _assistant(blocks: Sequence[schema.Block], reader: _Reader, names: dict[str, str]) -> list[Turn]:
    """The assistant's turns: more than one if a provider's server has called tools between them."""
    turns = [Turn("assistant", [])]
    served = _ServedCalls(reader)
    for index, block in enumerate(blocks):
        turn = turns[-1]
        match block:
            case schema.TextBlock(text=text):
                turn.parts.append(text or "")
            case schema.ThinkingBlock(thinking=thinking):
                turn.reasoning_content = "\n".join(filter(None, [turn.reasoning_content, thinking])) or None
            case schema.ToolUseBlock(id=call_id, name=name, input=arguments):
                names[call_id] = name
                turn.calls.append(Call(name, json_text(arguments, f"{reader.where}[{index}].input"), call_id))
            case schema.RedactedThinkingBlock():
                continue  # for its maker's eyes only
            case Unserved():
                turns += served.read(block, turn)
            case _:
                reader.leave_out(block, index)
    served.end()
    return turns if len(turns) == 1 or turns[-1] != Turn("assistant", []) else turns[:-1]


class _ServedCalls:
    """Calls of tools that a provider's server has run: they and their results become calls and results of a chat."""

    def __init__(self, reader: _Reader) -> None:
        self._reader = reader
        self._calls: dict[str, tuple[Unserved, Call]] = {}  # without results yet, by id

    def read(self, block: Unserved, turn: Turn) -> list[Turn]:
        """Read a block, which may end the assistant's `turn`; returns the turns that follow."""
        value, where = block.value if isinstance(block.value, dict) else {}, f"{self._reader.where}[]"
        call_id = value.get("id") if block.kind in _SERVER_CALLS else value.get("tool_use_id")
        if block.kind in _SERVER_CALLS and isinstance(call_id, str):
            call = Call(str(value.get("name")), json_text(value.get("input"), where), call_id)
            self._calls[call_id] = block, call
        elif block.kind.endswith("_tool_result") and str(call_id) in self._calls and not turn.calls:
            call = self._calls.pop(str(call_id))[1]
            turn.calls.append(call)
            return [
                Turn("tool", [text_of(value.get("content"))], tool_call_id=call.id, name=call.name),
                Turn("assistant", []),
            ]
        elif text := self._left_out(block):
            turn.parts.append(text)
        return []

    def end(self) -> None:
        """Note the calls that have no result."""
        for block, _ in self._calls.values():
            self._left_out(block)

    def _left_out(self, block: Unserved) -> str:
        return stand_in(block, f"{_INDEX.sub('[]', self._reader.where)}[]", self._reader.ignored)


def _user(blocks: Sequence[schema.Block], reader: _Reader, names: Mapping[str, str]) -> list[Turn]:
    """A turn, and one before it for each result of a tool, whose images clients may put next to it."""
    turns: list[Turn] = []
    parts: list[Part] = []
    new = reader.new
    if any(isinstance(block, schema.ToolResultBlock) for block in blocks):
        reader = replace(reader, new=False)
    for index, block in enumerate(blocks):
        match block:
            case schema.TextBlock(text=text):
                parts.append(text or "")
            case schema.ToolResultBlock(tool_use_id=call_id) if call_id not in names and not new:
                reader.leave_out(block, index)
            case schema.ToolResultBlock():
                turns.append(_result(block, replace(reader, where=f"{reader.where}[{index}]"), names))
            case Unserved():
                parts.append(reader.read(block, index))
            case _:
                reader.leave_out(block, index)
    return [*turns, Turn("user", parts)] if parts or not turns else turns


def _result(block: schema.ToolResultBlock, reader: _Reader, names: Mapping[str, str]) -> Turn:
    name = names.get(block.tool_use_id)
    if name is None:
        field = f"{reader.where}.tool_use_id"
        message = f"`{field}` is `{block.tool_use_id}`, but no earlier `tool_use` block has this id."
        raise invalid(message, field, "invalid_value")
    parts = _parts(block.content or "", replace(reader, where=f"{reader.where}.content", result=True)) or [""]
    if block.is_error:
        first = parts[0]
        parts[:1] = [f"Error: {first}"] if isinstance(first, str) else ["Error:", first]
    return Turn("tool", parts, tool_call_id=block.tool_use_id, name=name)


def _parts(content: str | Sequence[schema.Block], reader: _Reader) -> list[Part]:
    if isinstance(content, str):
        return [content]
    parts: list[Part] = []
    for index, block in enumerate(content):
        if isinstance(block, Unserved):
            parts.append(reader.read(block, index))
        elif isinstance(block, schema.TextBlock):
            parts.append(block.text or "")
        else:
            reader.leave_out(block, index)
    return parts
