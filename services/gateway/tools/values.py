"""A JSON object that is passed on as it comes."""

from __future__ import annotations

from services.gateway.tools.calls import Found


class JsonValue:
    """The arguments of a call whose name is known: everything up to the brace that closes the first one."""

    begun = True

    def __init__(self) -> None:
        self.complete = False
        self._depth = 0
        self._in_string = self._escaped = False

    def feed(self, char: str, found: Found) -> None:
        """Read a character; what comes before the object is left out."""
        if self._depth == 0 and char != "{":
            return
        found.arguments(char)
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
