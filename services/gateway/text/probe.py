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


def reads_texts(render: Render) -> bool:
    """Whether a message's content may be a text; some templates of models that see read parts only."""
    turn = {"role": "user", "content": _FIRST}
    return _FIRST in _rendered(render, [turn]) or _FIRST not in _rendered(render, [turn | {"content": _PARTS}])


def roles_with_images(render: Render, placeholder: str) -> frozenset[str]:
    """The roles whose images become `placeholder`, in their place among the parts."""
    parts = [{"type": "text", "text": _FIRST}, {"type": "image", "text": _CALLED}, {"type": "text", "text": _SECOND}]

    def shows(turns: list[Turn]) -> bool:
        text = _rendered(render, turns)
        between = text[text.find(_FIRST) + len(_FIRST) : text.find(_SECOND)]
        return _FIRST in text and between.strip() == placeholder

    return frozenset(role for role in ROLES if any(shows(turns) for turns in _conversations(role, parts)))


def renders_calls(render: Render) -> bool:
    """Whether the template renders calls and their results."""
    result = {"role": "tool", "content": _FIRST, "tool_call_id": "a1b2c3d4e", "name": _CALLED}
    texts = [_rendered(render, [_USER, call, result]) for call in _CALLS]
    return any(_CALLED in text and _FIRST in text for text in texts)


def _conversations(role: str, parts: list[dict[str, str]] = _PARTS) -> list[list[Turn]]:
    turn = {"role": role, "content": parts}
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
