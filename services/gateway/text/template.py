"""Renders chat templates, and says what a template supports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError

from services.common.templates import compile_template
from services.gateway.text.probe import reads_texts, renders_calls, roles_with_images, roles_with_parts


def _in_parts(message: Mapping[str, Any]) -> Mapping[str, Any]:
    content = message["content"]
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


class TemplateRefusedError(Exception):
    """A conversation that a template does not take."""


class ChatTemplate:
    """One model's template; raises ValueError when it is not valid Jinja2."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._template = compile_template(source)
        self._template.globals = dict(self._template.globals)  # copied at each rendering, a dict fastest
        self._special_tokens = dict(special_tokens)
        self.source = source
        self.knows_tools = "tools" in source  # else a system message lists the tools
        self.knows_calls = self.knows_tools or renders_calls(self._render)
        self.roles_with_parts = roles_with_parts(self._render)  # for other roles the parts are joined
        self._reads_texts = reads_texts(self._render)
        self._roles_with_images: dict[str, frozenset[str]] = {}  # by placeholder
        self.knows_developers = "developer" in source  # else `system` replaces the role `developer`

    def roles_with_images(self, placeholder: str) -> frozenset[str]:
        """The roles whose images the template shows as `placeholder`; for others that is a text of its own."""
        if placeholder not in self._roles_with_images:
            self._roles_with_images[placeholder] = roles_with_images(self._render, placeholder)
        return self._roles_with_images[placeholder]

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The prompt for a conversation; raises :class:`TemplateRefusedError` when the template does not take it."""
        if not self._reads_texts:
            messages = [_in_parts(message) for message in messages]
        try:
            return self._render(messages, add_generation_prompt=add_generation_prompt, **variables)
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            raise TemplateRefusedError(str(error)) from error

    def _render(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        fixed = {"tools": None, "documents": None, "add_generation_prompt": False, **self._special_tokens}
        return self._template.render(**(fixed | variables), messages=messages)
