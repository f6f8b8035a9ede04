"""Custom tools, whose input is text: the model calls them as functions with one argument, `input`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from services.gateway.api.options import FunctionDefinition
from services.gateway.api.parts import json_text
from services.gateway.tools.calls import CallDelta, Parsed
from services.gateway.tools.parser import CallReader

_INPUT: dict[str, Any] = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}


def custom_function(name: str, description: str | None, grammar: Mapping[str, Any] | None) -> FunctionDefinition:
    """A custom tool as a function; the `syntax` and `definition` of a grammar are shown, and not enforced."""
    note = (
        f"The input must follow this {grammar.get('syntax')} grammar:\n{grammar.get('definition')}" if grammar else ""
    )
    described = "\n\n".join(filter(None, [description or "", note]))
    return FunctionDefinition(name=name, description=described, parameters=_INPUT)


def input_arguments(given: Any, where: str) -> str:
    """The arguments by which the model calls a custom tool; an input that is no text is shown as JSON.

    Raises :class:`ApiError` (400) with the path `where`.
    """
    text = given if isinstance(given, str) else "" if given is None else json_text(given, where)
    return msgspec.json.encode({"input": text}).decode()


def input_of(arguments: str) -> str:
    """The input of a custom tool; arguments of another form are the input themselves."""
    try:
        given = msgspec.json.decode(arguments, type=dict[str, Any] | str)
    except (msgspec.DecodeError, RecursionError):
        return arguments
    text = given if isinstance(given, str) else given.get("input")
    return text if isinstance(text, str) else arguments


class CustomReader:
    """Marks calls of custom tools, and replaces their arguments by their input, which comes in one piece."""

    def __init__(self, calls: CallReader, names: frozenset[str]) -> None:
        """`names`: the custom tools."""
        self._calls = calls
        self._names = names
        self._open: CallDelta | None = None  # a call of a custom tool, with its arguments so far

    def push(self, text: str) -> Parsed:
        """See :class:`CallReader`."""
        return self._marked(self._calls.push(text))

    def finish(self) -> Parsed:
        """See :class:`CallReader`."""
        parsed = self._marked(self._calls.finish())
        parsed.calls += self._ended()
        return parsed

    def _marked(self, parsed: Parsed) -> Parsed:
        calls: list[CallDelta] = []
        for call in parsed.calls:
            if call.name is None and self._open is not None:
                self._open.arguments += call.arguments
                continue
            if call.name is not None:
                calls += self._ended()
            if call.name in self._names:
                self._open = CallDelta(call.index, arguments=call.arguments, custom=True)
                calls.append(CallDelta(call.index, call.name, custom=True))
            else:
                calls.append(call)
        parsed.calls = calls
        return parsed

    def _ended(self) -> list[CallDelta]:
        """The input of the open call, if there is one: it has ended."""
        call, self._open = self._open, None
        return [] if call is None else [CallDelta(call.index, arguments=input_of(call.arguments), custom=True)]
