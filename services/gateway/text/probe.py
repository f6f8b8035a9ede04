"""Finds out how a chat template handles parts of text, calls and results, by rendering short conversations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jinja2 import TemplateError

Turn = dict[str, Any]
_FIRST, _SECOND = "\ue100first\ue100", "\ue100second\ue100"
_PARTS = [{"type": "text", "text": _FIRST}, {"type": "text", "text": _SECOND}]
_USER: Turn = {"role": "user", "content": "a"}
_CALLED = "\ue100called\ue100"
ROLES = ("system", "developer", "user", "assistant", "tool")
Render = Callable[[Sequence[Turn]], str]


def _call(arguments: Mapping[str, Any] | str) -> Turn:
    call = {"type": "function", "id": "a1b2c3d4e", "function": {"name": _CALLED, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


_CALLS = (_call({"a": 1}), _call('{"a": 1}'))  # most templates take arguments as an object, some as text


def roles_with_parts(render: Render) -> frozenset[str]:
    """The roles whose content may be a list of parts. For others the template fails or prints the Python list."""
    return frozenset(role for role in ROLES if any(_shows_parts(render, turns) for turns in _conversations(role)))


def renders_calls(render: Render) -> bool:
    """Whether the template renders calls and their results."""
    result = {"role": "tool", "content": _FIRST, "tool_call_id": "a1b2c3d4e", "name": _CALLED}
    texts = [_rendered(render, [_USER, call, result]) for call in _CALLS]
    return any(_CALLED in text and _FIRST in text for text in texts)


def _conversations(role: str) -> list[list[Turn]]:
    turn = {"role": role, "content": _PARTS}
    match role:
        case "system" | "developer":
            return [[turn, _USER]]
        case "user":
            return [[turn]]
        case "tool":
            return [[_USER, call, turn | {"tool_call_id": "a1b2c3d4e", "name": _CALLED}] for call in _CALLS]
    return [[_USER, turn]]


def _shows_parts(render: Render, turns: list[Turn]) -> bool:
    text = _rendered(render, turns)
    first, second = text.find(_FIRST), text.find(_SECOND)
    return 0 <= first < second and "type" not in text[first:second]


def _rendered(render: Render, turns: list[Turn]) -> str:
    try:
        return render(turns)
    except (TemplateError, TypeError, ValueError, KeyError):
        return ""
