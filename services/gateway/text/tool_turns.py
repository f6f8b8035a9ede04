"""Adds tools and calls to a conversation for templates that do not support them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

Turn = dict[str, Any]
SYSTEM_ROLES = ("system", "developer")

_GENERIC_FORM = """\
You can call functions. To call one, answer with nothing but
<tool_call>
{"name": "the function's name", "arguments": {...}}
</tool_call>
and its result will follow. These are the functions:
"""
_OWN_FORM = """\
You can call functions; the result of a call will follow it. These are the functions:
"""


def joined(content: str | Sequence[dict[str, str]]) -> str:
    """The content of a message as one text, with a line for each part."""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def with_tools_told(turns: Sequence[Turn], definitions: Sequence[dict[str, Any]], *, own_form: bool) -> list[Turn]:
    """Add a system message that lists the tools, for a template that does not list them.

    `own_form`: the template renders calls itself, so the message prescribes no form.
    """
    instructions = _OWN_FORM if own_form else _GENERIC_FORM
    text = instructions + "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in definitions)
    if turns and turns[0]["role"] in SYSTEM_ROLES:
        return [turns[0] | {"content": f"{joined(turns[0]['content'])}\n\n{text}"}, *turns[1:]]
    return [{"role": "system", "content": text}, *turns]


def without_calls(turns: Sequence[Turn]) -> list[Turn]:
    """Replace calls and results by plain messages in Hermes' form, for a template that renders neither."""
    return [_plain(turn) for turn in turns]


def _plain(turn: Turn) -> Turn:
    if turn["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{joined(turn['content'])}\n</tool_response>"}
    calls = turn.get("tool_calls")
    if not calls:
        return turn
    written = [f"<tool_call>\n{json.dumps(call['function'], ensure_ascii=False)}\n</tool_call>" for call in calls]
    return {"role": turn["role"], "content": "\n".join(filter(None, [joined(turn["content"]), *written]))}


def with_roles_in_turn(turns: Sequence[Turn]) -> list[Turn]:
    """One system message at the beginning, later ones as the user's, and one message for the user's in succession."""
    merged: list[Turn] = []
    for index, turn in enumerate(turns):
        late = turn["role"] in SYSTEM_ROLES and any(before["role"] not in SYSTEM_ROLES for before in turns[:index])
        role = "user" if late else turn["role"]
        if merged and role == merged[-1]["role"] and role in ("user", *SYSTEM_ROLES):
            merged[-1] = merged[-1] | {"content": f"{joined(merged[-1]['content'])}\n\n{joined(turn['content'])}"}
        else:
            merged.append(turn | {"role": role})
    return merged


def with_text_arguments(turns: Sequence[Turn]) -> list[Turn]:
    """Replace arguments of calls by JSON text, which a few templates expect."""
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
