"""Chat templates, rendered as transformers' ``apply_chat_template`` renders them, in an immutable sandbox."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from jinja2 import Environment, TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from services.gateway.errors import ApiError, invalid


class _GenerationTag(Extension):
    """``{% generation %}`` marks the assistant's tokens for training; when serving it only renders its body."""

    tags = {"generation"}  # noqa: RUF012  # Jinja2's own interface

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Replace the block by its body."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without Jinja2's HTML escaping."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(pattern: str) -> str:
    return time.strftime(pattern)


def _new_environment() -> Environment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplate:
    """One model's template; raises ValueError when it is not valid Jinja2."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        try:
            self._template = _new_environment().from_string(source)
        except TemplateSyntaxError as error:
            raise ValueError(f"chat template, line {error.lineno}: {error.message}") from error
        self._special_tokens = dict(special_tokens)
        self.knows_developers = "developer" in source  # others refuse the role: it is the newer name of `system`

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The prompt for a conversation; raises :class:`ApiError` (400) when the template refuses it."""
        try:
            return self._template.render(
                **{"tools": None, "documents": None, **self._special_tokens, **variables},
                messages=messages,
                add_generation_prompt=add_generation_prompt,
            )
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            raise _refused(error) from error


def _refused(error: Exception) -> ApiError:
    return invalid(f"The model's chat template refused the messages: {error}", "messages", "chat_template_error")
