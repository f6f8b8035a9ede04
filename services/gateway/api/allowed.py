"""Lists the values that a field allows, from the type of its body, for error messages."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import Any

from msgspec import inspect

_STEP = re.compile(r"\[(?P<index>[^\]]*)\]|(?P<field>[^.\[]+)")
_CONTAINERS = (inspect.ListType, inspect.SetType, inspect.VarTupleType, inspect.FrozenSetType)


_type_of = cache(inspect.type_info)


def allowed_values(kind: Any, path: str) -> tuple[str | int, ...]:
    """The allowed values of an enumeration at a path such as `messages[0].role`; empty if it is no enumeration."""
    reached = list(_alternatives(_type_of(kind)))
    for step in _STEP.finditer(path):
        reached = [deeper for one in reached for deeper in _below(one, step["field"])]
    literals = (one.values for one in reached if isinstance(one, inspect.LiteralType))
    return tuple(dict.fromkeys(value for values in literals for value in values if value is not None))


def _alternatives(kind: inspect.Type) -> Iterator[inspect.Type]:
    """The types of a union, or the one type."""
    match kind:
        case inspect.Metadata(type=inner):
            yield from _alternatives(inner)
        case inspect.UnionType(types=types):
            for one in types:
                yield from _alternatives(one)
        case _:
            yield kind


def _below(kind: inspect.Type, field: str | None) -> Iterator[inspect.Type]:
    """The types of a field; of a list's items when `field` is None."""
    if isinstance(kind, inspect.StructType) and field is not None:
        if field == kind.tag_field and kind.tag is not None:
            yield inspect.LiteralType((kind.tag,))
        for one in kind.fields:
            if one.encode_name == field:
                yield from _alternatives(one.type)
    elif field is None and isinstance(kind, _CONTAINERS):
        yield from _alternatives(kind.item_type)
