"""From the lists of a body to its structs, with errors that name the item."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal, TypeVar

import msgspec

from services.gateway.api.decode import explain
from services.gateway.errors import ApiError, invalid
from services.gateway.http.responses.schema import (
    ITEMS,
    PARTS,
    AllowedTools,
    FunctionChoice,
    FunctionTool,
    Item,
    MessageItem,
    ReferenceItem,
    ResponsesBody,
)

Mode = Literal["none", "auto", "required"]
_MODES: dict[str, Mode] = {"none": "none", "auto": "auto", "required": "required"}
S = TypeVar("S", bound=msgspec.Struct)
_PART_TYPE = re.compile(r"\[\d+\]\.type$")


def read_items(value: str | Sequence[dict[str, Any]] | None, field: str = "input") -> list[Item | ReferenceItem]:
    """The items of a body; raises :class:`ApiError` (400)."""
    if value is None:
        return []
    if isinstance(value, str):
        return [MessageItem(role="user", content=value)]
    found = []
    for index, raw in enumerate(value):
        kind, where = raw.get("type"), f"{field}[{index}]"
        kind = "message" if kind is None else kind
        struct = ITEMS.get(kind) if isinstance(kind, str) else None
        if struct is None:
            raise _unsupported(f"{where}.type", kind, tuple(ITEMS))
        found.append(_converted({**raw, "type": kind}, struct, where))
    return found


def read_tools(body: ResponsesBody) -> list[FunctionTool]:
    """The functions of a body; raises :class:`ApiError` (400) naming the first tool that is none."""
    found = []
    for index, raw in enumerate(body.tools or ()):
        where = f"tools[{index}]"
        if (kind := raw.get("type", "function")) != "function":
            raise _unsupported(f"{where}.type", kind, ("function",))
        found.append(_converted(raw, FunctionTool, where))
    return found


def read_choice(body: ResponsesBody) -> Mode | FunctionChoice | AllowedTools | None:
    """The choice of tools; raises :class:`ApiError` (400)."""
    choice = body.tool_choice
    if choice is None:
        return None
    if isinstance(choice, str):
        if choice not in _MODES:
            raise _unsupported("tool_choice", choice, tuple(_MODES))
        return _MODES[choice]
    kind = choice.get("type")
    if kind == "function":
        return _converted(choice, FunctionChoice, "tool_choice")
    if kind == "allowed_tools":
        return _converted(choice, AllowedTools, "tool_choice")
    raise _unsupported("tool_choice.type", kind, ("function", "allowed_tools"))


def _unsupported(param: str, value: object, allowed: Sequence[str]) -> ApiError:
    shown = msgspec.json.encode(value).decode()[:100]
    listed = ", ".join(f"`{name}`" for name in allowed)
    return invalid(f"`{param}` may be {listed}; {shown} is not supported.", param, "unsupported_value")


def _converted(raw: dict[str, Any], kind: type[S], where: str) -> S:
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        found = explain(error, kind)
        param = f"{where}.{found.param}" if found.param else where
        message = found.message.replace(f"`{found.param}`" if found.param else "the body", f"`{param}`")
        if _PART_TYPE.search(param):
            message += f" Supported are {', '.join(f'`{part}`' for part in PARTS)}."
        raise invalid(message, param, found.code or "invalid_value") from error
