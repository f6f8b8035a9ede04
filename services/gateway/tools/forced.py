"""Parsers of calls that a grammar enforces: the text has no marks and nothing but calls."""

from __future__ import annotations

from services.gateway.tools.calls import Found
from services.gateway.tools.hermes import HermesParser
from services.gateway.tools.parser import ToolParser


class RequiredParser(ToolParser):
    """For `tool_choice: "required"`: the text is an array of calls."""

    bare = "["
    enforced = True


class EnforcedHermesParser(HermesParser):
    """For calls that a grammar enforces within free text: they have Hermes' form."""

    enforced = True


class NamedParser:
    """For a named function: the text is its arguments."""

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
