"""Models that were not trained on tools and do as the prompt says: Hermes' form, with or without its marks."""

from __future__ import annotations

from services.gateway.tools.parser import ToolParser


class GenericParser(ToolParser):
    """See the module."""

    begins = ("<tool_call>",)
    ends = ("</tool_call>",)
    bare = "{["
    between = ","
