"""Grammars of calls: required ones, and those of strict tools among free text or beside a schema of the answer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from llguidance import StructTag

from services.gateway.api.schema import FunctionDefinition
from services.gateway.grammar.formats import of_schema

_ANY_OBJECT = {"type": "object"}


def of_named(tool: FunctionDefinition) -> str:
    """The arguments of one function."""
    return of_schema(tool.parameters or _ANY_OBJECT)


def of_required(tools: Sequence[FunctionDefinition], *, parallel: bool) -> str:
    """An array of at least one call, and not more unless `parallel`."""
    more = '(", " call)*' if parallel else ""
    rules = [f'start: "[" call {more} "]"', f"call: {' | '.join(f'call_{i}' for i in range(len(tools)))}"]
    return "\n".join([*rules, *_calls(tools)])


def of_strict(tools: Sequence[FunctionDefinition]) -> str:
    """Free text, and calls in Hermes' form that follow their schemas."""
    tags = [
        StructTag(
            trigger="<tool_call>",
            begin=f'<tool_call>\n{{"name": {json.dumps(tool.name)}, "arguments": ',
            grammar=_schema(tool if tool.strict else None),
            end="}\n</tool_call>",
        )
        for tool in tools
    ]
    return StructTag.to_grammar(tags, assume_special=False)


def of_answer_or_calls(tools: Sequence[FunctionDefinition], answer: dict[str, Any]) -> str:
    """JSON by the schema `answer`, or calls in Hermes' form."""
    calls = " | ".join(f"call_{i}" for i in range(len(tools)))
    head = [
        "start: answer | call+",
        f"answer: %json {json.dumps(answer)}",
        f'call: "<tool_call>\\n" ({calls}) "\\n</tool_call>" "\\n"?',
    ]
    return "\n".join([*head, *_calls(tools)])


def _calls(tools: Sequence[FunctionDefinition]) -> list[str]:
    """A rule `call_i` for every tool. Each schema is a grammar of its own: its `$ref`s are about itself."""
    rules = []
    for i, tool in enumerate(tools):
        opening = json.dumps(f'{{"name": {json.dumps(tool.name)}, "arguments": ')
        rules += [f'call_{i}: {opening} arguments_{i} "}}"', f"arguments_{i}: %json {json.dumps(_schema(tool))}"]
    return rules


def _schema(tool: FunctionDefinition | None) -> dict[str, Any]:
    """The arguments' schema, with blanks as in every other one."""
    built = json.loads(of_schema((tool.parameters if tool else None) or _ANY_OBJECT))
    schema: dict[str, Any] = built["grammars"][0]["json_schema"]
    return schema
