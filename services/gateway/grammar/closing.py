"""Closes objects: without `additionalProperties`, a schema forbids all properties that it does not name.

A weak model would invent further properties until its token limit. If several schemas describe one object (`allOf`, or
properties next to `anyOf` or `$ref`), each alone would forbid the properties of the others; so only the outermost
schema is closed, and allows the names of all. An object whose schema names no property stays open: it is a free map.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from services.gateway.grammar.subschemas import Node, applied, combined, walk

_OF_OBJECTS = frozenset(
    {
        *("properties", "patternProperties", "required", "minProperties", "maxProperties", "propertyNames"),
        *("additionalProperties", "unevaluatedProperties"),
    }
)
_SAYS = ("additionalProperties", "unevaluatedProperties")


@dataclass(slots=True)
class _Names:
    """The names in all schemas of one object; `decided`: one of the schemas decides about further properties."""

    properties: dict[str, Any] = field(default_factory=dict)
    patterns: dict[str, Any] = field(default_factory=dict)
    least: int = 0
    decided: bool = False

    def add(self, node: Node) -> None:
        self.properties |= dict.fromkeys([*node.get("properties", ()), *node.get("required", ())], True)
        self.patterns |= dict.fromkeys(node.get("patternProperties", ()), True)
        self.least = max(self.least, node.get("minProperties", 0))
        described = "propertyNames" in node and "patternProperties" not in node
        self.decided = self.decided or described or any(keyword in node for keyword in _SAYS)

    @property
    def closable(self) -> bool:
        return bool(self.properties or self.patterns) and (bool(self.patterns) or self.least <= len(self.properties))


def close_objects(root: Node, *, by_default: bool) -> frozenset[int]:
    """Close objects in place; without `by_default`, only those with `unevaluatedProperties: false`.

    Returns the ids of schemas that describe an object only together with others.
    """
    nodes = [node for _, node in walk(root)]
    parts = _parts(root, nodes)
    for node in nodes:
        alone = isinstance(node.get("unevaluatedProperties"), bool) and not node.pop("unevaluatedProperties")
        named = "properties" in node or "patternProperties" in node or _is_composed(root, node)
        if alone or (by_default and named and id(node) not in parts):
            _close(root, node, alone=alone)
    return frozenset(parts)


def close_arguments(root: Node) -> None:
    """Make the schema of arguments an object in place; a schema that names no property allows none."""
    if not any(True for _ in applied(root, root)):
        root.setdefault("type", "object")
        if root["type"] == "object" and not root.keys() & _OF_OBJECTS:
            root["properties"], root["additionalProperties"] = {}, False


def _is_composed(root: Node, node: Node) -> bool:
    """Whether several schemas together describe one object. Alternatives alone describe one object each."""
    keywords = [keyword for keyword, _ in applied(root, node)]
    if node.keys() & _OF_OBJECTS:
        return bool(keywords)
    return len(keywords) > 1 and {*keywords} not in ({"anyOf"}, {"oneOf"})


def _parts(root: Node, nodes: list[Node]) -> set[int]:
    composed = (part for node in nodes if _is_composed(root, node) for _, part in applied(root, node))
    return {id(further) for part in composed for further in combined(root, part)}


def _close(root: Node, node: Node, *, alone: bool) -> None:
    names = _Names()
    for part in combined(root, node):
        names.add(part)
    empty = alone or "properties" in node
    if names.decided or not (names.closable or (empty and not names.least)):
        return
    node["properties"] = names.properties | node.get("properties", {})
    if names.patterns:
        node["patternProperties"] = names.patterns | node.get("patternProperties", {})
    node["additionalProperties"] = False
