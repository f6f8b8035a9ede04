"""Calls that a grammar makes the model write: no marks, and nothing else in the text."""

from __future__ import annotations

from services.gateway.tools.calls import Found
from services.gateway.tools.parser import ToolParser


class RequiredParser(ToolParser):
    """`tool_choice: "required"`: an array of calls."""

    bare = "["


class NamedParser:
    """A named function: the text is its arguments."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._begun = False

    def push(self, text: str) -> Found:
        """Read a piece."""
        found = Found(int(self._begun))
        if text and not self._begun:
            self._begun = True
            found.begin(self._name)
        if text:
            found.arguments(text)
        return found

    def finish(self) -> Found:
        """The text has ended."""
        return Found(int(self._begun))
