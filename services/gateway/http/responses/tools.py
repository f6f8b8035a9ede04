"""The tools that a body of /v1/responses offers, as functions that the prompt describes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import msgspec

from services.gateway.api.chat import OfferedTools
from services.gateway.api.decode import converted, unsupported_value
from services.gateway.api.ignored import Ignored, Unserved
from services.gateway.api.options import MAX_TOOLS, FunctionDefinition
from services.gateway.errors import ApiError, invalid
from services.gateway.http.responses.schema import (
    TOOL_ITEMS,
    CustomTool,
    FunctionTool,
    Item,
    NamespaceTool,
    ResponsesBody,
    ToolChoice,
    ToolChoiceAllowed,
)
from services.gateway.tools.custom import custom_function

_INDEX = re.compile(r"\[\d+\]")
_MODES = ("none", "auto", "required")
_SERVED = ("function", "custom", "namespace")  # types of the client's own tools; all others are hosted ones


def flat_name(namespace: str | None, name: str) -> str:
    """Return the model's name for a tool of a namespace."""
    if not namespace:
        return name
    return f"{namespace}{name}" if namespace.endswith("__") else f"{namespace}__{name}"


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """A tool that the model may call."""

    tool: FunctionTool | CustomTool
    namespace: str = ""

    @property
    def name(self) -> str:
        """The model's name for it."""
        return flat_name(self.namespace, self.tool.name)

    def function(self) -> FunctionDefinition:
        """As a chat's function: a custom tool has one argument, its text."""
        tool = self.tool
        if isinstance(tool, FunctionTool):
            return FunctionDefinition(
                name=self.name, description=tool.description, parameters=tool.parameters, strict=tool.strict
            )
        form = tool.format or {}
        return custom_function(self.name, tool.description, form if form.get("type") == "grammar" else None)


@dataclass(frozen=True, slots=True)
class ToolOffer:
    """The tools of a body."""

    ignored: Ignored  # collects what is left out
    lenient: bool = False  # malformed tools are left out
    tools: list[OfferedTool] = field(default_factory=list)
    listed: list[dict[str, Any]] = field(default_factory=list)  # as a response lists them

    def names(self, choice: ToolChoice, where: str) -> list[str]:
        """Return the model's names of the tools in a choice; raises :class:`ApiError` (400)."""
        names = [
            offered.name
            for offered in self.tools
            if choice.name in (offered.tool.name, offered.name) and choice.namespace in (None, offered.namespace)
        ]
        if not names:
            message = f"`{where}` names `{choice.name}`, which is not among the tools."
            raise invalid(message, where, "invalid_value")
        return names


def read_tools(body: ResponsesBody, items: Sequence[Item], given: int, ignored: Ignored) -> ToolOffer:
    """The tools of a body and of its conversation; raises :class:`ApiError` (400) naming the first that is none.

    `given`: how many of the items are the body's. Of tools with the same name, the body's counts, else the last one.
    """
    offer = ToolOffer(ignored)
    for index, raw in enumerate(body.tools or ()):
        _read_tool(raw, f"tools[{index}]", offer, "")
    own = {offered.name for offered in offer.tools}
    added = _read_added(items, given, ignored)
    offer.tools.extend(offered for name, offered in added.items() if name not in own)
    if len(offer.tools) > MAX_TOOLS:
        message = f"`tools` and `input` may offer at most {MAX_TOOLS} tools, got {len(offer.tools)}."
        raise invalid(message, "input", "invalid_value")
    return offer


def _read_added(items: Sequence[Item], given: int, ignored: Ignored) -> dict[str, OfferedTool]:
    """The tools that items add, by name. Those of other types are left out, and malformed ones of a history."""
    added: dict[str, OfferedTool] = {}
    other = (index for index, item in enumerate(items, given - len(items)) if not _offers(item))
    newest = max(other, default=-1)
    for index, item in enumerate(items, given - len(items)):
        if not _offers(item):
            continue
        where, tools = f"input[{index}].tools", item.value.get("tools")
        offer = ToolOffer(ignored, lenient=index < newest)
        if not isinstance(tools, list) and not offer.lenient:
            raise invalid(f"`{where}` must be a list of objects.", where, "invalid_value")
        if not isinstance(tools, list):
            ignored.add("input[].tools")
            continue
        for number, raw in enumerate(tools):
            _read_tool(raw, f"{where}[{number}]", offer, "")
        added |= {offered.name: offered for offered in offer.tools}
    return added


def _offers(item: Item) -> TypeGuard[Unserved]:
    return isinstance(item, Unserved) and item.kind in TOOL_ITEMS


def _read_tool(raw: Any, where: str, offer: ToolOffer, namespace: str) -> None:
    """Add a tool to the offer; raises :class:`ApiError` (400) for a malformed one, unless the offer is lenient."""
    try:
        if not isinstance(raw, dict):
            raise invalid(f"`{where}` must be an object.", where)
        _add_tool(raw, where, offer, namespace)
    except ApiError:
        if not offer.lenient:
            raise
        offer.ignored.add(_INDEX.sub("[]", where))


def _add_tool(raw: dict[str, Any], where: str, offer: ToolOffer, namespace: str) -> None:
    kind, served = raw.get("type", "function"), _SERVED[:2] if namespace else _SERVED
    if not isinstance(kind, str):
        raise unsupported_value(f"{where}.type", kind, served)
    if kind not in served:
        offer.ignored.add(f"{_INDEX.sub('[]', where)}.type={kind}")
        return
    if kind == "function":
        function = converted(raw, FunctionTool, where, offer.ignored)
        offer.tools.append(OfferedTool(function, namespace))
        listed = {key: value for key, value in msgspec.to_builtins(function).items() if value is not None}
        listed |= {"parameters": function.parameters, "strict": bool(function.strict)}
    elif kind == "custom":
        offer.tools.append(OfferedTool(converted(raw, CustomTool, where, offer.ignored), namespace))
        listed = raw
    else:
        group = converted(raw, NamespaceTool, where, offer.ignored)
        for index, inner in enumerate(group.tools):
            _read_tool(inner, f"{where}.tools[{index}]", offer, group.name)
        listed = raw
    if not namespace:
        offer.listed.append(listed)


def offered_tools(body: ResponsesBody, offer: ToolOffer) -> OfferedTools:
    """The tools that the prompt describes, and which of them the model must call; raises :class:`ApiError` (400)."""
    tools, choice = _chosen(body.tool_choice, offer)
    functions = [offered.function() for offered in tools]
    return OfferedTools(functions, choice, body.parallel_tool_calls is not False)


def _chosen(choice: str | dict[str, Any] | None, offer: ToolOffer) -> tuple[list[OfferedTool], str]:
    if choice is None:
        return offer.tools, "auto"
    if isinstance(choice, str):
        if choice not in _MODES:
            raise unsupported_value("tool_choice", choice, _MODES)
        return offer.tools, choice
    kind = choice.get("type")
    if kind in _MODES:
        return offer.tools, str(kind)
    if kind in ("function", "custom"):
        name = offer.names(converted(choice, ToolChoice, "tool_choice", offer.ignored), "tool_choice")[0]
        return offer.tools, name
    if kind == "allowed_tools":
        allowed = converted(choice, ToolChoiceAllowed, "tool_choice", offer.ignored)
        return _allowed(allowed, offer), allowed.mode
    if isinstance(kind, str):
        raise _forced("tool_choice", kind)
    raise unsupported_value("tool_choice.type", kind, ("function", "custom", "allowed_tools"))


def _allowed(choice: ToolChoiceAllowed, offer: ToolOffer) -> list[OfferedTool]:
    names: set[str] = set()
    for raw in choice.tools:
        if raw.get("type", "function") in _SERVED[:2]:
            tool = converted(raw, ToolChoice, "tool_choice.tools", offer.ignored)
            names |= set(offer.names(tool, "tool_choice.tools"))
    return [offered for offered in offer.tools if offered.name in names]


def _forced(where: str, name: str) -> ApiError:
    message = f"`{where}` forces `{name}`, a hosted tool: this server has none, so it is left out of `tools`."
    return invalid(message, where, "unsupported_value")
