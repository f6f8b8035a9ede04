"""Llama 3.1 and later: the whole answer is `{"name": ..., "parameters": {...}}`, several with `;` between them."""

from __future__ import annotations

from services.gateway.tools.parser import ToolParser


class Llama3JsonParser(ToolParser):
    """The parser of Llama's JSON format."""

    special = True
    begins = ("<|python_tag|>",)
    bare = "{"
    between = ";"
