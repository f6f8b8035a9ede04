"""Calls with the name in front of the arguments' JSON object, in each of the ways in which models mark the name."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from services.gateway.tools.calls import JsonCalls, MalformedCallError, Parsed
from services.gateway.tools.parser import OpenCall
from services.gateway.tools.values import JsonValue

_NUMBER = re.compile(r"(?:call_)?\d+")


@dataclass(frozen=True, slots=True)
class Head:
    """The text between the mark of a call and the brace of its arguments."""

    pattern: re.Pattern[str]  # with a group `name`
    json: bool = False  # an array of calls may be there instead
    numbered: bool = False  # a number may stand in the place of the name


class HeadedCall:
    """Reads the head, then the arguments, which have to tell the tool if the head has a number in its name's place."""

    def __init__(self, head: Head, call: OpenCall) -> None:
        self.begun = False
        self.complete = False
        self._form = head
        self._call = call
        self._head = ""
        self._value: JsonCalls | JsonValue | None = None
        self._nameless: Parsed | None = None  # the arguments of a call whose tool they have to tell

    def feed(self, char: str, parsed: Parsed) -> None:
        """Read a character. Raises MalformedCallError."""
        if self._value is None:
            self._read_head(char, parsed)
        if self._value is None:
            return
        if self._nameless is None:
            self._value.feed(char, parsed)
            self.begun, self.complete = self._value.begun, self._value.complete
        else:
            self._value.feed(char, self._nameless)
            if self._value.complete:
                self._name(self._nameless.calls[0].arguments, parsed)

    def _read_head(self, char: str, parsed: Parsed) -> None:
        if self._form.json and char == "[" and not self._head.strip():
            self._value = JsonCalls()
        elif char != "{":
            self._head += char
        else:
            match = self._form.pattern.fullmatch(self._head)
            if match is None:
                raise MalformedCallError(f"a call has no name before its arguments: {self._head!r}")
            self._value = JsonValue()
            if self._form.numbered and match["name"] not in self._call.names and _NUMBER.fullmatch(match["name"]):
                self._nameless = Parsed()
            else:
                parsed.begin(match["name"])

    def _name(self, arguments: str, parsed: Parsed) -> None:
        name = _tool_of(arguments, self._call)
        if name is None:
            raise MalformedCallError("no tool has these arguments, or several have")
        self.begun = self.complete = True
        parsed.begin(name)
        parsed.arguments(arguments)


def _tool_of(arguments: str, call: OpenCall) -> str | None:
    """The only tool, or the only one that has all properties of the arguments and requires no others."""
    if len(call.names) == 1:
        return next(iter(call.names))
    try:
        keys = json.loads(arguments).keys()
    except (ValueError, RecursionError):
        return None
    named = [
        name
        for name in call.names
        if set(call.schemas.get(name, {}).get("required") or ()) <= keys
        and keys <= (call.schemas.get(name, {}).get("properties") or {}).keys()
    ]
    return named[0] if len(named) == 1 else None
