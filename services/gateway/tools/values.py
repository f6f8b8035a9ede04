"""Reads a JSON object and passes it on as it arrives."""

from __future__ import annotations

from services.gateway.tools.calls import Parsed


class JsonValue:
    """Reads the arguments of a call whose name is known, up to the brace that closes the object."""

    begun = True

    def __init__(self) -> None:
        self.complete = False
        self._depth = 0
        self._in_string = self._escaped = False

    def feed(self, char: str, parsed: Parsed) -> None:
        """Read a character; the first is the brace that opens the object."""
        parsed.arguments(char)
        if self._in_string:
            self._in_string = self._escaped or char != '"'
            self._escaped = char == "\\" and not self._escaped
        elif char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            self.complete = self._depth == 0
