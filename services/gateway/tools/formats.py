"""Chooses the parser of a model's calls."""

from __future__ import annotations

from functools import lru_cache

from services.gateway.tools.deepseek import DeepSeekParser
from services.gateway.tools.generic import GenericParser
from services.gateway.tools.granite import GraniteParser
from services.gateway.tools.hermes import HermesParser
from services.gateway.tools.llama3_json import Llama3JsonParser
from services.gateway.tools.mistral import MistralParser
from services.gateway.tools.parser import ToolParser
from services.gateway.tools.pythonic import PythonicParser

PARSERS: dict[str, type[ToolParser]] = {
    "hermes": HermesParser,
    "llama3_json": Llama3JsonParser,
    "mistral": MistralParser,
    "pythonic": PythonicParser,
    "deepseek": DeepSeekParser,
    "granite": GraniteParser,
    "generic": GenericParser,
}

# A model writes the first format whose sign its chat template contains.
_SIGNS = (
    ("[TOOL_CALLS]", "mistral"),
    ("<｜tool▁call▁begin｜>", "deepseek"),
    ("<|tool_call|>", "granite"),
    ("<tool_call>", "hermes"),
    ("func_name1(params_name1=", "pythonic"),
    ("<|python_tag|>", "llama3_json"),
    ("ipython", "llama3_json"),
)


@lru_cache
def parser_for(template: str, setting: str) -> type[ToolParser]:
    """The parser that a setting names; "auto" chooses it by the chat template."""
    if setting != "auto":
        return PARSERS[setting]
    return PARSERS[next((name for sign, name in _SIGNS if sign in template), "generic")]
