"""Checks the numbers in schemas: llguidance reads them as doubles, which change integers beyond 2^53."""

from __future__ import annotations

import math

from services.gateway.grammar.subschemas import Node

_EXACT = 2**53
_FOLLOWED_FROM = 2**56  # larger lower bounds do not compile
_FOLLOWED_TO = 2**63  # larger upper bounds do not compile
_TINY = 1e-50
_LOWER = ("minimum", "exclusiveMinimum")
_UPPER = ("maximum", "exclusiveMaximum")


def check_values(node: Node) -> None:
    """Raises ValueError for a value of `const` or `enum` that a double cannot hold."""
    for keyword in ("const", "enum"):
        if (inexact := _inexact(node.get(keyword))) is not None:
            raise ValueError(
                f"`{keyword}` has {inexact}, and integers beyond 2^53 cannot be written exactly; ask for a string"
            )


def _inexact(value: object) -> int | None:
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, int) and not _is_exact(value):
            return value
        if isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value
    return None


def loosen_bounds(node: Node) -> list[str]:
    """Widen bounds that the grammar cannot enforce, in place; returns their keywords."""
    loosened = []
    whole = node.get("type") == "integer"
    for keyword in (*_LOWER, *_UPPER):
        bound = node.get(keyword)
        if isinstance(bound, bool) or not isinstance(bound, int | float):
            continue
        lower = keyword in _LOWER
        if not _is_followed(-bound if lower else bound, whole=whole):
            loosened.append(keyword)
            del node[keyword]
            inward = bound > _EXACT if lower else bound < -_EXACT
            if inward:
                node[keyword] = _EXACT if lower else -_EXACT
    return loosened


def _is_followed(upper: float, *, whole: bool) -> bool:
    """Whether the grammar enforces an upper bound exactly."""
    if whole and upper == _FOLLOWED_TO - 1:
        return True
    if not _is_exact(upper) or 0 < abs(upper) < _TINY:
        return False
    return -_FOLLOWED_FROM <= upper < _FOLLOWED_TO


def _is_exact(value: float) -> bool:
    try:
        return math.isfinite(value) and float(value) == value
    except OverflowError:
        return False
