"""For models without training on tools, which follow the prompt: Hermes' form, with or without marks."""

from __future__ import annotations

from services.gateway.tools.parser import ToolParser


class GenericParser(ToolParser):
    """The parser of Hermes' form with optional marks."""

    begins = ("<tool_call>",)
    ends = ("</tool_call>",)
    bare = "{["
    between = ","
