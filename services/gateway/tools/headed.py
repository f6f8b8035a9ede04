"""Calls with the name in front of the arguments' JSON object, in each of the ways in which models mark the name."""

from __future__ import annotations

import re
from dataclasses import dataclass

from services.gateway.tools.calls import JsonCalls, MalformedCallError, Parsed
from services.gateway.tools.values import JsonValue


@dataclass(frozen=True, slots=True)
class Head:
    """The text between the mark of a call and the brace of its arguments."""

    pattern: re.Pattern[str]  # with a group `name`
    json: bool = False  # an array of calls may be there instead


class HeadedCall:
    """Reads the head, then the arguments."""

    def __init__(self, head: Head) -> None:
        self.begun = False
        self.complete = False
        self._form = head
        self._head = ""
        self._value: JsonCalls | JsonValue | None = None

    def feed(self, char: str, parsed: Parsed) -> None:
        """Read a character. Raises MalformedCallError."""
        if self._value is None:
            self._read_head(char, parsed)
        if self._value is not None:
            self._value.feed(char, parsed)
            self.begun, self.complete = self._value.begun, self._value.complete

    def _read_head(self, char: str, parsed: Parsed) -> None:
        if self._form.json and char == "[" and not self._head.strip():
            self._value = JsonCalls()
        elif char != "{":
            self._head += char
        else:
            match = self._form.pattern.fullmatch(self._head)
            if match is None:
                raise MalformedCallError(f"a call has no name before its arguments: {self._head!r}")
            parsed.begin(match["name"])
            self._value = JsonValue()
