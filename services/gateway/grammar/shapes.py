"""Checks that the keywords which this package reads have values of the right type."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from services.gateway.grammar.subschemas import Node, walk

_COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
_LONGEST = 2**31 - 1  # more than any answer has, and a count that llguidance reads
_OVERFLOW = 2**1024


def check_shapes(root: Node) -> None:
    """Check all keywords and make counts integers, in place; raises ValueError naming the keyword."""
    for pointer, node in walk(root):
        for keywords, fits, name in _SHAPES:
            for keyword in keywords:
                if keyword in node and not fits(node[keyword]):
                    raise _wrong(keyword, pointer, name)
        for keyword in _COUNTS:
            if keyword in node:
                node[keyword] = _count(keyword, pointer, node[keyword])


def _is_object(value: object) -> bool:
    return isinstance(value, dict)


def _are_names(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _is_number(value: object) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < _OVERFLOW


_DOUBLE = "a number that a double holds"
_SHAPES: tuple[tuple[tuple[str, ...], Callable[[Any], bool], str], ...] = (
    (("allOf", "anyOf", "oneOf", "prefixItems", "enum"), lambda value: isinstance(value, list), "a list"),
    (("type",), lambda value: isinstance(value, str) or _are_names(value), "a name or a list of names"),
    (("required",), _are_names, "a list of names"),
    (("properties", "patternProperties", "dependentSchemas", "$defs", "definitions"), _is_object, "an object"),
    (("minimum", "maximum"), _is_number, _DOUBLE),
    # Draft 4 has booleans.
    (("exclusiveMinimum", "exclusiveMaximum"), lambda value: isinstance(value, bool) or _is_number(value), _DOUBLE),
    (("multipleOf",), lambda value: _is_number(value) and value > 0, "a number above 0 that a double holds"),
)


def _count(keyword: str, pointer: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value // 1 or value < 0:
        raise _wrong(keyword, pointer, "a number of at least 0 without a fraction")
    return min(int(value), _LONGEST)


def _wrong(keyword: str, pointer: str, kind: str) -> ValueError:
    return ValueError(f"`{keyword}` at `{pointer or '/'}` must be {kind}")
