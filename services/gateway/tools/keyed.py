"""Apertus: an array of objects, each with a tool's name as its key and the arguments as its value."""

from __future__ import annotations

import re

from services.gateway.tools.calls import MalformedCallError, Parsed
from services.gateway.tools.values import JsonValue

_HEAD = re.compile(r'[\s\[,}]*\{\s*"(?P<name>[^"\\{}]+)"\s*:\s*')
_LONGEST = 300  # characters of a head


class KeyedCalls:
    """Reads the calls of one array."""

    def __init__(self) -> None:
        self.begun = False
        self.complete = False
        self._text = ""  # since the arguments of the last call
        self._value: JsonValue | None = None

    def feed(self, char: str, parsed: Parsed) -> None:
        """Read a character. Raises MalformedCallError."""
        if self._value is not None:
            self._read_value(char, parsed)
        elif char == "{" and (match := _HEAD.fullmatch(self._text)):
            self.begun, self._value = True, JsonValue()
            parsed.begin(match["name"])
            self._value.feed(char, parsed)
        elif char == "]" and self.begun and not self._text.strip(" \n\t\r,}"):
            self.complete = True
        else:
            self._text += char
            self._check()

    def _read_value(self, char: str, parsed: Parsed) -> None:
        assert self._value is not None
        self._value.feed(char, parsed)
        if self._value.complete:
            self._value, self._text = None, ""

    def _check(self) -> None:
        text = self._text.lstrip()
        if len(text) > _LONGEST or (text and not self.begun and text[0] != "["):
            raise MalformedCallError(f"no array of calls: {text[:20]!r}")
