"""Tools and calls in the conversation that a chat template renders."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

Turn = dict[str, Any]

_INSTRUCTIONS = """\
You can call functions. To call one, answer with nothing but
<tool_call>
{"name": "the function's name", "arguments": {...}}
</tool_call>
and its result will follow. These are the functions:
"""


def without_tools(turns: Sequence[Turn], definitions: Sequence[dict[str, Any]]) -> list[Turn]:
    """The conversation for a template that knows no tools: they are told, and calls written, in plain messages."""
    told = [_plain(turn) for turn in turns]
    if not definitions:
        return told
    text = _INSTRUCTIONS + "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in definitions)
    if told and told[0]["role"] in ("system", "developer"):
        return [told[0] | {"content": f"{told[0]['content']}\n\n{text}"}, *told[1:]]
    return [{"role": "system", "content": text}, *told]


def _plain(turn: Turn) -> Turn:
    if turn["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{turn['content']}\n</tool_response>"}
    calls = turn.get("tool_calls")
    if not calls:
        return turn
    written = [f"<tool_call>\n{json.dumps(call['function'], ensure_ascii=False)}\n</tool_call>" for call in calls]
    return {"role": turn["role"], "content": "\n".join(filter(None, [turn["content"], *written]))}


def with_text_arguments(turns: Sequence[Turn]) -> list[Turn]:
    """Calls whose arguments are JSON text: a few templates join them to their own text."""
    return [
        turn | {"tool_calls": [call | {"function": _as_text(call["function"])} for call in turn["tool_calls"]]}
        if turn.get("tool_calls")
        else turn
        for turn in turns
    ]


def _as_text(function: dict[str, Any]) -> dict[str, Any]:
    arguments = function["arguments"]
    return function | {
        "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    }
