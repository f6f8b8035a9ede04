"""Mistral: `[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`, or `[TOOL_CALLS]name[ARGS]{...}` for each call."""

from __future__ import annotations

from services.gateway.tools.calls import JsonCalls, MalformedCallError, Parsed
from services.gateway.tools.parser import Body, ToolParser
from services.gateway.tools.values import JsonValue

_MARKS = ("[CALL_ID]", "[ARGS]")


class _Named:
    """Reads `name`, an optional call id, and the arguments."""

    def __init__(self) -> None:
        self.begun = False
        self.complete = False
        self._calls: JsonCalls | None = None
        self._head = ""
        self._value: JsonValue | None = None

    def feed(self, char: str, parsed: Parsed) -> None:
        """Read a character. Raises MalformedCallError."""
        if self._calls is not None:
            self._calls.feed(char, parsed)
            self.begun, self.complete = self._calls.begun, self._calls.complete
        elif self._value is not None:
            self._value.feed(char, parsed)
            self.complete = self._value.complete
        elif char == "[" and not self._head.strip():
            self._calls = JsonCalls()
            self._calls.feed(char, parsed)
        elif char == "{":
            self._begin(parsed)
            self.feed(char, parsed)
        else:
            self._head += char

    def _begin(self, parsed: Parsed) -> None:
        name = self._head
        for mark in _MARKS:
            name = name.split(mark)[0]
        if not name.strip():
            raise MalformedCallError("a call has no name")
        parsed.begin(name.strip())
        self.begun, self._value = True, JsonValue()


class MistralParser(ToolParser):
    """The parser of Mistral's format."""

    special = True
    begins = ("[TOOL_CALLS]",)

    def body(self, *, bare: bool) -> Body:
        """A reader for both forms."""
        return _Named()
