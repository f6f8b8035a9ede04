"""The lines of a training file: one conversation each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from services.gateway.api.decode import explain, lone_surrogate

LEAST_EXAMPLES = 10  # OpenAI's limit
MOST_NAMED = 20


class ExampleTextPart(Struct, kw_only=True, forbid_unknown_fields=True):
    """A part of a message."""

    type: Literal["text"]
    text: str


class CalledFunction(Struct, kw_only=True, forbid_unknown_fields=True):
    """A call's function."""

    name: str
    arguments: str


class ExampleCall(Struct, kw_only=True, forbid_unknown_fields=True):
    """A tool call of the assistant."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class ExampleMessage(Struct, kw_only=True, forbid_unknown_fields=True):
    """A message of an example."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ExampleTextPart] | None = None
    name: str | None = None
    weight: Literal[0, 1] | None = None
    tool_calls: list[ExampleCall] | None = None
    tool_call_id: str | None = None


class ExampleLine(Struct, kw_only=True, forbid_unknown_fields=True):
    """A line."""

    messages: Annotated[list[ExampleMessage], Meta(min_length=1)]
    tools: list[dict[str, Any]] | None = None
    parallel_tool_calls: bool | None = None


_decode = msgspec.json.Decoder(ExampleLine).decode


class FileInspector:
    """Checks all lines of a file."""

    def __init__(self, least: int) -> None:
        self._least = least
        self._total = 0
        self._wrong: list[tuple[int, str]] = []

    def look(self, number: int, data: bytes) -> None:
        """Check a line."""
        self._total += 1
        if reason := _trouble(data):
            self._wrong.append((number, reason))

    def verdict(self) -> str:
        """Return the file's error, with its first invalid lines; empty if it is valid."""
        if self._wrong:
            named = "; ".join(f"line {number}: {reason}" for number, reason in self._wrong[:MOST_NAMED])
            rest = len(self._wrong) - MOST_NAMED
            return f"{named}; and {rest} more lines" if rest > 0 else named
        if self._total < self._least:
            return f"it has {self._total} examples, and {self._least} is the least"
        return ""


def _trouble(data: bytes) -> str:
    """Return the error of a line; empty if it is valid."""
    try:
        line = _decode(data)
    except msgspec.ValidationError as error:
        return explain(error, ExampleLine).message.rstrip(".")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        lone = lone_surrogate(data)
        return lone.message if lone else f"not valid JSON: {error}"
    for index, turn in enumerate(line.messages):
        if reason := _trouble_of_turn(turn):
            return f"`messages[{index}]{reason}"
    return _trouble_of_order(line.messages)


def _trouble_of_turn(turn: ExampleMessage) -> str:
    if turn.role == "assistant":
        if not turn.content and not turn.tool_calls:
            return ".content`: an assistant's message needs `content` or `tool_calls`"
        return _trouble_of_calls(turn.tool_calls or ())
    if turn.content is None:
        return ".content` is missing"
    if turn.weight is not None:
        return ".weight` is for the role `assistant` only"
    return ".tool_calls` is for the role `assistant` only" if turn.tool_calls else ""


def _trouble_of_calls(calls: Sequence[ExampleCall]) -> str:
    for number, call in enumerate(calls):
        try:
            arguments = msgspec.json.decode(call.function.arguments)
        except msgspec.DecodeError:
            arguments = None
        if not isinstance(arguments, dict):
            return f".tool_calls[{number}].function.arguments` must be a JSON object as text"
    return ""


def _trouble_of_order(turns: Sequence[ExampleMessage]) -> str:
    if turns[-1].role != "assistant":
        return "the last message must be the assistant's"
    if not any(turn.role == "assistant" and turn.weight != 0 for turn in turns):
        return "no message of the assistant has a weight other than 0"
    return ""
