"""Hermes 2 Pro, Qwen 2.5 and 3: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, one after the other."""

from __future__ import annotations

from services.gateway.tools.parser import ToolParser


class HermesParser(ToolParser):
    """The parser of Hermes' format."""

    begins = ("<tool_call>",)
    ends = ("</tool_call>",)
