"""Granite 3: `<|tool_call|>[{"name": ..., "arguments": {...}}, ...]`, in some versions with `<tool_call>`."""

from __future__ import annotations

from services.gateway.tools.parser import ToolParser


class GraniteParser(ToolParser):
    """The parser of Granite's format."""

    special = True
    begins = ("<|tool_call|>", "<tool_call>")
    ends = ("</tool_call>",)
