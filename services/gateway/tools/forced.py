"""Parsers of calls that a grammar enforces: the text has no marks and nothing but calls."""

from __future__ import annotations

from dataclasses import replace

from services.gateway.tools.calls import Parsed
from services.gateway.tools.formats import HERMES
from services.gateway.tools.parser import CallFormat

# For `tool_choice: "required"`: the text is an array of calls.
REQUIRED = CallFormat(bare="[", enforced=True)
# For calls that a grammar enforces within free text: they have Hermes' form.
ENFORCED_HERMES = replace(HERMES, enforced=True)


class NamedParser:
    """For a named function: the text is its arguments."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._begun = False

    def push(self, text: str) -> Parsed:
        """Read a piece."""
        parsed = Parsed(int(self._begun))
        if text and not self._begun:
            self._begun = True
            parsed.begin(self._name)
        if text:
            parsed.arguments(text)
        return parsed

    def finish(self) -> Parsed:
        """The text has ended."""
        return Parsed(int(self._begun))
