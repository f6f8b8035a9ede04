"""Parts of a request that are left out, by name: unknown fields, and parts of histories that no model here reads.

One table decides for all APIs: the structs of the bodies. A field that its struct does not have is left out. Where a
tagged union has :class:`Unserved`, an object of another type, a malformed one and a bare value become one. A bare
value in place of a list of such a union is a list of one. Of a struct with `is_turn`, all but the last of a list are a
history: their malformed fields are left out, and so is what is malformed without them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from msgspec import Struct, ValidationError, convert, inspect

IGNORED_HEADER = "x-ryzanstein-ignored"
_MOST_NAMES = 32
_MAX_NAME_CHARS = 96
_UNSAFE = re.compile(r"[^A-Za-z0-9_.:$@/=\[\]-]")
_Listed = str | list[Any] | None  # types with parts
_FIELD = re.compile(r" - at `\$\.(?P<name>\w+)(?:\[(?P<index>\d+)\])?[^`]*`$")
_LISTS = (inspect.ListType, inspect.VarTupleType)


_BARE = ("boolean", "number", "object", "array")
_JSON_TYPES = ((bool, "boolean"), (int | float, "number"), (dict, "object"), (list, "array"))


class Unserved(Struct, tag_field="type", tag="unserved", forbid_unknown_fields=True):
    """An object of any other type: left out of a history, with its name in x-ryzanstein-ignored; else refused."""

    kind: str  # its type; of a bare value its JSON type
    value: Any
    fault: str | None = None  # how it is malformed, with the place below `$`
    alone: bool | None = None  # in place of a list

    @property
    def bare(self) -> bool:
        """Whether it is a JSON value without a type."""
        return self.kind in _BARE


@dataclass(slots=True)
class Ignored:
    """Collects the names of what is left out of one request."""

    refuse_fields: bool = False  # unknown fields stay, and are refused
    names: dict[str, None] = field(default_factory=dict)

    def add(self, name: str) -> None:
        """Note a field, as `messages[].prefix`, or a part of a history, as `messages[].content[].type=image`."""
        if len(self.names) <= _MOST_NAMES:
            shown = name if len(name) <= _MAX_NAME_CHARS else f"{name[: _MAX_NAME_CHARS - 3]}..."
            self.names[_UNSAFE.sub("?", shown)] = None

    @property
    def header(self) -> str:
        """The header's value, of a few thousand characters at most; empty if nothing was left out."""
        names = list(self.names)
        return ", ".join(names[:_MOST_NAMES] + ["..."] * (len(names) > _MOST_NAMES))


@dataclass(frozen=True, slots=True)
class _Shape:
    """The objects and lists that a type takes."""

    fields: Mapping[str, _Shape | None] | None = None  # fields of an object; None: any
    tagged: Mapping[object, _Shape] = field(default_factory=dict)  # objects by their tags
    tag_field: str = ""
    exact_without: str = ""  # a field: objects without it keep their unknown fields, which are refused
    unserved: bool = False  # other values become an `Unserved`, and so do texts without a tag
    texts: bool = False  # bare texts are served
    items: _Shape | None = None  # shape of a list's items
    struct: type[Struct] | None = None  # the type that an object is decoded to


@cache
def _shape(kind: Any) -> _Shape | None:
    return _shape_of(inspect.type_info(kind))


def _shape_of(described: inspect.Type) -> _Shape | None:
    """The shape of a type; None if nothing in it can be unknown."""
    kinds = list(_alternatives(described))
    structs = [kind for kind in kinds if isinstance(kind, inspect.StructType)]
    items = next((_shape_of(kind.item_type) for kind in kinds if isinstance(kind, _LISTS)), None)
    if not structs:
        return _Shape(items=items) if items else None
    if structs[0].tag_field is None:
        struct = structs[0].cls
        return _Shape(
            _fields(structs[0]), items=items, exact_without=getattr(struct, "exact_without", ""), struct=struct
        )
    return _Shape(
        tagged={one.tag: _Shape(_fields(one), struct=one.cls) for one in structs if one.cls is not Unserved},
        tag_field=structs[0].tag_field,
        unserved=any(one.cls is Unserved for one in structs),
        texts=any(isinstance(kind, inspect.StrType) for kind in kinds),
        items=items,
    )


def _alternatives(described: inspect.Type) -> list[inspect.Type]:
    if isinstance(described, inspect.Metadata):
        return _alternatives(described.type)
    if isinstance(described, inspect.UnionType):
        return [alternative for one in described.types for alternative in _alternatives(one)]
    return [described]


def _fields(described: inspect.StructType) -> dict[str, _Shape | None] | None:
    if not described.forbid_unknown_fields:
        return None
    tag = {described.tag_field: None} if described.tag_field else {}
    return tag | {one.encode_name: _shape_of(one.type) for one in described.fields}


def leave_out(value: Any, kind: Any, ignored: Ignored, where: str = "") -> Any:
    """Leave out of JSON for a `kind` what it does not know; returns the JSON, which is changed in place."""
    return _left(value, _shape(kind), ignored, where)


def _left(value: Any, shape: _Shape | None, ignored: Ignored, where: str) -> Any:
    if shape is None:
        return value
    if shape.unserved:
        return _left_part(value, shape, ignored, where)
    if shape.items is not None:
        return _left_list(value, shape.items, ignored, f"{where}[]")
    if isinstance(value, dict):
        if shape.tag_field:
            tagged = shape.tagged.get(_tag(value, shape))
            return value if tagged is None else _left(value, tagged, ignored, where)
        if shape.fields is not None and (not shape.exact_without or shape.exact_without in value):
            _leave_out_fields(value, shape.fields, ignored, f"{where}." if where else "")
    return value


def _left_list(value: Any, items: _Shape, ignored: Ignored, where: str) -> Any:
    if items.unserved and (fault := _fault(value, _Listed)):
        part = _left(value, items, ignored, where)
        alone = part[items.tag_field] == "unserved" and part["kind"] in _BARE
        return [part | {"fault": fault, "alone": True} if alone else part]
    if isinstance(value, list):
        value[:] = [_left(one, items, ignored, where) for one in value]
        if (struct := items.struct) and getattr(struct, "is_turn", False):
            value[:-1] = _well_formed(value[:-1], struct, ignored, where)
    return value


def _tag(value: dict[str, Any], shape: _Shape) -> str | None:
    tag = value.get(shape.tag_field)
    if tag is None and isinstance(value.get("text"), str):
        return "text"
    return tag if isinstance(tag, str) else None


def _left_part(value: Any, shape: _Shape, ignored: Ignored, where: str) -> Any:
    """A part of a list that takes any, as JSON of the struct that it becomes."""
    if isinstance(value, str):
        bare = {shape.tag_field: "unserved", "kind": "text", "value": value, "fault": _fault(value, dict)}
        return value if shape.texts else bare
    kind = _tag(value, shape) if isinstance(value, dict) else None
    fault = ""
    if kind is None:
        kind = next((name for types, name in _JSON_TYPES if isinstance(value, types)), "null")
        fault = _fault(value, dict) or f"Object missing required field `{shape.tag_field}`"
    elif kind in shape.tagged and shape.tag_field in value:
        known = shape.tagged[kind]
        value = _left(value, known, ignored, where)
        fault = _fault(value, known.struct)
        if not fault:
            return value
    return {shape.tag_field: "unserved", "kind": kind, "value": value, "fault": fault}


def _fault(value: Any, kind: Any) -> str:
    """How JSON is malformed for a type, with the place below `$`; empty if it is not."""
    try:
        convert(value, kind)
    except ValidationError as error:
        return str(error)
    return ""


def _well_formed(history: list[Any], struct: type[Struct], ignored: Ignored, where: str) -> Iterator[Any]:
    """Yield the turns that are well-formed without their malformed fields and list items."""
    for turn in history:
        while fault := _fault(turn, struct):
            place = _FIELD.search(fault)
            if place is None:
                ignored.add(where)
                break
            name, index = place["name"], place["index"]
            ignored.add(f"{where}.{name}{'' if index is None else '[]'}")
            if index is None:
                del turn[name]
            else:
                del turn[name][int(index)]
        else:
            yield turn


def _leave_out_fields(
    value: dict[str, Any], fields: Mapping[str, _Shape | None], ignored: Ignored, prefix: str
) -> None:
    for name in list(value):
        if name in fields:
            value[name] = _left(value[name], fields[name], ignored, f"{prefix}{name}")
        elif not ignored.refuse_fields:
            ignored.add(f"{prefix}{name}")
            del value[name]
