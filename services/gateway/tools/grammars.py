"""Grammars of calls: of required calls, and of strict tools in free text or instead of an answer by a schema."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from llguidance import StructTag

from services.gateway.api.options import FunctionDefinition
from services.gateway.grammar.formats import of_schema
from services.gateway.grammar.schemas import Check, SchemaRules, ready

_ANY_OBJECT = {"type": "object"}
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class CallForm:
    """A function's name and the schema of its arguments."""

    name: str
    schema: dict[str, Any]
    check: Check | None = None


def form_of(tool: FunctionDefinition, field: str, *, closed: bool) -> CallForm:
    """The form of a tool's calls, by its schema. Raises ValueError, :class:`ApiError`."""
    rules = SchemaRules(field, closed, tool.strict is True, tool.name)
    arguments = ready({} if tool.parameters is None else tool.parameters, rules)
    return CallForm(tool.name, arguments.schema, arguments.check)


def free_form_of(tool: FunctionDefinition) -> CallForm:
    """The form of calls with any object as arguments; with an empty one if the tool has no parameters."""
    return CallForm(tool.name, _ANY_OBJECT if tool.parameters else _NO_ARGUMENTS)


def of_named(form: CallForm) -> str:
    """The grammar of one function's arguments."""
    return of_schema(form.schema)


def of_required(forms: Sequence[CallForm], *, parallel: bool) -> str:
    """The grammar of an array of one call, or of several if `parallel`."""
    more = '(", " call)*' if parallel else ""
    rules = [f'start: "[" call {more} "]"', f"call: {' | '.join(f'call_{i}' for i in range(len(forms)))}"]
    return "\n".join([*rules, *_calls(forms)])


def of_strict(forms: Sequence[CallForm]) -> str:
    """The grammar of free text with calls in Hermes' form."""
    tags = [
        StructTag(
            trigger="<tool_call>",
            begin=f'<tool_call>\n{{"name": {json.dumps(form.name)}, "arguments": ',
            grammar=_schema(form),
            end="}\n</tool_call>",
        )
        for form in forms
    ]
    return StructTag.to_grammar(tags, assume_special=False)


def of_answer_or_calls(forms: Sequence[CallForm], answer: dict[str, Any]) -> str:
    """The grammar of JSON by the schema `answer`, or of calls in Hermes' form."""
    calls = " | ".join(f"call_{i}" for i in range(len(forms)))
    head = [
        "start: answer | call+",
        f"answer: %json {json.dumps(answer)}",
        f'call: "<tool_call>\\n" ({calls}) "\\n</tool_call>" "\\n"?',
    ]
    return "\n".join([*head, *_calls(forms)])


def _calls(forms: Sequence[CallForm]) -> list[str]:
    """A rule `call_i` for each tool. Each schema is a separate grammar, because its `$ref`s refer to itself."""
    rules = []
    for i, form in enumerate(forms):
        opening = json.dumps(f'{{"name": {json.dumps(form.name)}, "arguments": ')
        rules += [f'call_{i}: {opening} arguments_{i} "}}"', f"arguments_{i}: %json {json.dumps(_schema(form))}"]
    return rules


def _schema(form: CallForm) -> dict[str, Any]:
    """The arguments' schema, with the usual rule for blanks."""
    schema: dict[str, Any] = json.loads(of_schema(form.schema))["grammars"][0]["json_schema"]
    return schema
