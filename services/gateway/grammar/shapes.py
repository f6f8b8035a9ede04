"""Checks that the keywords which this package reads have values of the right type."""

from __future__ import annotations

from services.gateway.grammar.subschemas import Node, walk

_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "enum", "required")
_OBJECTS = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
_COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")


def check_shapes(root: Node) -> None:
    """Check all keywords and make counts integers, in place; raises ValueError naming the keyword."""
    for pointer, node in walk(root):
        for keywords, kind, name in ((_LISTS, list, "a list"), (_OBJECTS, dict, "an object")):
            for keyword in keywords:
                if keyword in node and not isinstance(node[keyword], kind):
                    raise _wrong(keyword, pointer, name)
        if not all(isinstance(name, str) for name in node.get("required", ())):
            raise _wrong("required", pointer, "a list of names")
        for keyword in _COUNTS:
            if keyword in node:
                node[keyword] = _count(keyword, pointer, node[keyword])


def _count(keyword: str, pointer: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value // 1 or value < 0:
        raise _wrong(keyword, pointer, "a number of at least 0 without a fraction")
    return int(value)


def _wrong(keyword: str, pointer: str, kind: str) -> ValueError:
    return ValueError(f"`{keyword}` at `{pointer or '/'}` must be {kind}")
