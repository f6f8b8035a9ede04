"""A format of calls as users know it."""

from __future__ import annotations

from dataclasses import dataclass

from services.gateway.tools.parser import CallFormat


@dataclass(frozen=True, slots=True)
class NamedFormat:
    """A format, its models, and how it is recognized."""

    models: str
    example: str  # a call of `get_weather`
    form: CallFormat
    signs: tuple[str, ...] = ()  # a model writes the format if its template has one of them
    aliases: tuple[str, ...] = ()  # names of its parsers in vLLM and SGLang
