"""DeepSeek V3 and R1: `<｜tool▁call▁begin｜>function<｜tool▁sep｜>name`, the arguments in a JSON fence, an end mark.

V3.1 writes the name before the separator, and the arguments, without a fence, after it. Calls are between
`<｜tool▁calls▁begin｜>` and `<｜tool▁calls▁end｜>`.
"""

from __future__ import annotations

from services.gateway.tools.calls import MalformedCallError, Parsed
from services.gateway.tools.parser import Body, ToolParser
from services.gateway.tools.values import JsonValue

_SEPARATOR = "<｜tool▁sep｜>"


class _Call:
    def __init__(self) -> None:
        self.begun = False
        self.complete = False
        self._head = ""
        self._value = JsonValue()

    def feed(self, char: str, parsed: Parsed) -> None:
        """Read a character. Raises MalformedCallError."""
        if not self.begun and char == "{":
            kind, separator, name = self._head.partition(_SEPARATOR)
            name = name.split("```")[0].strip() or kind.strip()
            if not separator or not name:
                raise MalformedCallError("a call has no name")
            self.begun = True
            parsed.begin(name)
        if self.begun:
            self._value.feed(char, parsed)
            self.complete = self._value.complete
        else:
            self._head += char


class DeepSeekParser(ToolParser):
    """The parser of DeepSeek's format."""

    special = True
    begins = ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>", "<｜tool▁call▁begin｜>")
    ends = ("```<｜tool▁call▁end｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>")

    def body(self, *, bare: bool) -> Body:
        """A reader for both forms."""
        return _Call()
