"""The results of parsers: content, and calls piece by piece."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

_NAMES, _ARGUMENTS = ("name", "tool_name"), ("arguments", "parameters", "args")


class MalformedCallError(ValueError):
    """A text that looked like a call is content."""


@dataclass(slots=True)
class CallDelta:
    """A piece of a call: the first has the name, later ones more of the arguments' JSON."""

    index: int
    name: str | None = None
    arguments: str = ""
    id: str | None = None  # in the piece with the name
    custom: bool = False  # custom tool: `arguments` is its input, and no JSON


def join_calls(calls: list[CallDelta], deltas: Iterable[CallDelta]) -> None:
    """Append pieces to their calls."""
    for delta in deltas:
        if delta.index == len(calls):
            calls.append(replace(delta))
        else:
            call = calls[delta.index]
            call.name, call.id = call.name or delta.name, call.id or delta.id
            call.arguments += delta.arguments


def call_deltas(calls: Iterable[CallDelta]) -> list[dict[str, Any]]:
    """Pieces of calls in the form of OpenAI's streams."""
    return [{"index": call.index, **call_json(call)} for call in calls]


def call_json(call: CallDelta) -> dict[str, Any]:
    """A call, or a piece of it, in the form of OpenAI's messages."""
    kind = "custom" if call.custom else "function"
    head = {} if call.id is None else {"id": call.id, "type": kind}
    return head | {kind: _custom_json(call) if call.custom else function_json(call)}


def _custom_json(call: CallDelta) -> dict[str, str]:
    return ({} if call.name is None else {"name": call.name}) | {"input": call.arguments}


def function_json(call: CallDelta) -> dict[str, str]:
    """A call's function; only the first piece has a name."""
    return ({} if call.name is None else {"name": call.name}) | {"arguments": call.arguments}


@dataclass(slots=True)
class Parsed:
    """The content and calls in a piece of text, and the number of earlier calls."""

    n_calls: int = 0
    content: str = ""
    calls: list[CallDelta] = field(default_factory=list)

    def begin(self, name: str) -> None:
        """Begin another call."""
        self.calls.append(CallDelta(self.n_calls, name))
        self.n_calls += 1

    def arguments(self, text: str) -> None:
        """Append to the last call's arguments."""
        if not self.calls:
            self.calls.append(CallDelta(self.n_calls - 1))
        self.calls[-1].arguments += text


class JsonCall:
    """Reads one `{"name": ..., "arguments": {...}}` by character, and passes the arguments on as they arrive.

    The first character is the one after the opening brace.

    Arguments before the name wait for it; arguments inside a JSON string are unwrapped.
    """

    def __init__(self, names: frozenset[str] | None = None) -> None:
        """`names`: a call of another function is content."""
        self.begun = False
        self.complete = False
        self._names = names
        self._depth = 1
        self._in_string = self._escaped = False
        self._key: str | None = None
        self._value = ""
        self._arguments = ""

    def feed(self, char: str, parsed: Parsed) -> None:
        """Read a character. Raises MalformedCallError."""
        if self._in_string or char == '"':
            self._read_string(char, parsed)
        elif char in "{[":
            self._depth += 1
            self._take(char, parsed)
        elif char in "}]":
            self._close(char, parsed)
        elif self._depth > 1:
            self._take(char, parsed)
        elif char == ":":
            self._key, self._value = str(_decoded(self._value)), ""
        elif char == ",":
            self._end_value(parsed)
        elif not char.isspace():
            self._take(char, parsed)

    def _read_string(self, char: str, parsed: Parsed) -> None:
        self._take(char, parsed)
        if not self._in_string:
            self._in_string = True
        elif self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            self._in_string = False

    def _close(self, char: str, parsed: Parsed) -> None:
        self._depth -= 1
        if self._depth:
            self._take(char, parsed)
            return
        self._end_value(parsed)
        if not self.begun:
            raise MalformedCallError("a call has no name")
        if not self._arguments:
            parsed.arguments("{}")
        self.complete = True

    @property
    def _passes_on(self) -> bool:
        return self.begun and self._key in _ARGUMENTS and self._value.startswith("{")

    def _take(self, char: str, parsed: Parsed) -> None:
        self._value += char
        if self._passes_on:
            parsed.arguments(char)

    def _end_value(self, parsed: Parsed) -> None:
        if self._key in _NAMES:
            name = _decoded(self._value)
            if not isinstance(name, str) or (self._names is not None and name not in self._names):
                raise MalformedCallError(f"{name!r} is no tool")
            self.begun = True
            parsed.begin(name)
            parsed.arguments(self._arguments)
        elif self._key in _ARGUMENTS:
            passed_on, self._arguments = self._passes_on, _as_object(self._value)
            if self.begun and not passed_on:
                parsed.arguments(self._arguments)
        self._key, self._value = None, ""


class JsonCalls:
    """Reads one call, or an array of them."""

    def __init__(self, names: frozenset[str] | None = None) -> None:
        self.begun = False
        self.complete = False
        self._names = names
        self._in_array = False
        self._call: JsonCall | None = None

    def feed(self, char: str, parsed: Parsed) -> None:
        """Read a character. Raises MalformedCallError."""
        if self._call is not None:
            self._call.feed(char, parsed)
            self.begun = self.begun or self._call.begun
            if self._call.complete:
                self._call, self.complete = None, not self._in_array
        elif char == "[" and not self._in_array:
            self._in_array = True
        elif char == "]" and self._in_array:
            self.complete = True
        elif char == "{":
            self._call = JsonCall(self._names)
        elif not (char.isspace() or (char == "," and self._in_array)):
            raise MalformedCallError(f"a call begins with {char!r}")


def _decoded(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError as error:
        raise MalformedCallError(str(error)) from error


def _as_object(text: str) -> str:
    """The arguments' JSON object: some models write it as a string, or null for no arguments.

    A string without an object remains a JSON string, so that clients can read it.
    """
    if text == "null":
        return "{}"
    inner = str(_decoded(text)).strip() if text.startswith('"') else text
    return "{}" if not inner else inner if inner.startswith("{") else text
