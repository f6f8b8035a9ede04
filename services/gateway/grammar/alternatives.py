"""Replaces `oneOf` by `anyOf`, and shows whether both mean the same: that no value is valid by two of the schemas."""

from __future__ import annotations

import json
from itertools import combinations
from typing import Any

from services.gateway.grammar.subschemas import Node, resolved

_MOST_COMPARED = 128
_TYPES = {str: "string", bool: "boolean", type(None): "null", list: "array", dict: "object"}


def merge_one_of(root: Node, node: Node) -> bool:
    """Replace `oneOf` in place; returns whether the schema's meaning is unchanged.

    Objects with a `discriminator` get its property as a required one, which makes them distinct.
    """
    branches = node.pop("oneOf")
    same = _are_disjoint(root, branches)
    if not same and (tag := _tag(root, node, branches)) is not None:
        for part in (resolved(root, branch) for branch in branches):
            part["required"] = sorted({*part.get("required", ()), tag})
        same = True
    if "anyOf" in node:
        node.setdefault("allOf", []).append({"anyOf": branches})
    else:
        node["anyOf"] = branches
    return same


def values_of(root: Node, node: object) -> list[Any] | None:
    """All values that a schema allows, if it lists them."""
    schema = resolved(root, node)
    if "const" in schema:
        return [schema["const"]]
    if "enum" in schema:
        return list(schema["enum"])
    few: dict[str, list[Any]] = {"boolean": [True, False], "null": [None]}
    return few.get(str(schema.get("type")))


def _are_disjoint(root: Node, branches: list[object]) -> bool:
    if len(branches) > _MOST_COMPARED:
        return False
    nodes = [resolved(root, branch) for branch in branches]
    return all(_differ(root, one, other) for one, other in combinations(nodes, 2))


def _differ(root: Node, one: Node, other: Node) -> bool:
    values, others = values_of(root, one), values_of(root, other)
    if values is not None and others is not None:
        return _share_nothing(values, others)
    types, other_types = _types(one, values), _types(other, others)
    if types is None or other_types is None:
        return False
    if not types & other_types:
        return True
    return types == other_types == {"object"} and (
        _differ_by_value(root, one, other) or _needs_unknown(one, other) or _needs_unknown(other, one)
    )


def _differ_by_value(root: Node, one: Node, other: Node) -> bool:
    """Whether both require a property for which they allow no common value."""
    for name in {*one.get("required", ())} & {*other.get("required", ())}:
        values, others = (values_of(root, part.get("properties", {}).get(name)) for part in (one, other))
        if values is not None and others is not None and _share_nothing(values, others):
            return True
    return False


def _needs_unknown(one: Node, other: Node) -> bool:
    """Whether `one` requires a property that `other` forbids."""
    closed = other.get("additionalProperties") is False and not other.get("patternProperties")
    return closed and not {*one.get("required", ())} <= other.get("properties", {}).keys()


def _tag(root: Node, node: Node, branches: list[object]) -> str | None:
    """The property of a `discriminator`, if it has different values in all schemas."""
    about = node.get("discriminator")
    name = about.get("propertyName") if isinstance(about, dict) else None
    if not isinstance(name, str):
        return None
    nodes = [resolved(root, branch) for branch in branches]
    values = [values_of(root, part.get("properties", {}).get(name)) for part in nodes]
    if any(part.get("type") != "object" for part in nodes) or len(values) > _MOST_COMPARED:
        return None
    apart = all(a is not None and b is not None and _share_nothing(a, b) for a, b in combinations(values, 2))
    return name if apart else None


def _share_nothing(values: list[Any], others: list[Any]) -> bool:
    scalar = not any(isinstance(value, list | dict) for value in (*values, *others))
    return scalar and {_key(value) for value in values}.isdisjoint(_key(value) for value in others)


def _key(value: object) -> object:
    """A key for equality in JSON, where 1 is 1.0 and not `true`."""
    return value if isinstance(value, int | float) and not isinstance(value, bool) else json.dumps(value)


def _types(node: Node, values: list[Any] | None) -> set[str] | None:
    if values is not None:
        kinds = {_TYPES.get(type(value), "number") for value in values}
    elif isinstance(node.get("type"), str):
        kinds = {node["type"]}
    elif isinstance(node.get("type"), list):
        kinds = {str(kind) for kind in node["type"]}
    else:
        return None
    return {"number" if kind == "integer" else kind for kind in kinds}
