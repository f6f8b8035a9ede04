"""MiniMax M3: parameters as elements that hold elements. A call is passed on as a whole.

`<invoke name="get_weather"><city>Oslo</city><days><item>1</item></days></invoke>`, each tag behind a mark of the model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from services.gateway.tools.calls import MalformedCallError, Parsed
from services.gateway.tools.markup import Schemas, kind_of, read_value


class NestedCall:
    """Reads one call."""

    def __init__(self, mark: str, schemas: Schemas, *, called: bool) -> None:
        """`mark`: before each tag. `called`: the mark before the name has been read."""
        self.begun = False
        self.complete = False
        self._mark = mark
        self._schemas = schemas
        self._call = f'{mark}<invoke name="'
        self._end = f"{mark}</invoke>"
        self._text = self._call if called else ""

    def feed(self, char: str, parsed: Parsed) -> None:
        """Read a character. Raises MalformedCallError."""
        self._text += char
        text = self._text.lstrip()
        if len(text) <= len(self._call) and not self._call.startswith(text):
            raise MalformedCallError(f"a call begins with {text!r}")
        if self._text.endswith(self._end):
            self._finish(parsed)

    def _finish(self, parsed: Parsed) -> None:
        text = self._text.lstrip().removeprefix(self._call).removesuffix(self._end)
        name, _, body = text.partition('">')
        if not re.fullmatch(r"[\w.-]+", name):
            raise MalformedCallError(f"{name!r} is no name")
        arguments = _arguments(body.split(self._mark), self._schemas.get(name, {}))
        self.begun = self.complete = True
        parsed.begin(name)
        parsed.arguments(json.dumps(arguments, ensure_ascii=False))


@dataclass(slots=True)
class _Element:
    """An element whose end has not been read, or the arguments themselves."""

    tag: str
    text: str
    schema: Mapping[str, Any]
    children: list[tuple[str, object]] = field(default_factory=list)

    def value(self) -> object:
        """An object, an array of the elements `item`, or the text by its schema."""
        if self.children and all(tag == "item" for tag, _ in self.children):
            return [value for _, value in self.children]
        if self.children or (self.schema.get("type") == "object" and not self.text.strip()):
            return _object(self.children)
        if self.schema.get("type") == "array" and not self.text.strip():
            return []
        return self.text if kind_of(self.schema) == "text" else read_value(self.text)

    def schema_of(self, tag: str) -> Mapping[str, Any]:
        """The schema of a child; empty: it has none."""
        inner = self.schema.get("items") if tag == "item" else None
        inner = inner or (self.schema.get("properties") or {}).get(tag) or self.schema.get("additionalProperties")
        return inner if isinstance(inner, Mapping) else {}


def _arguments(tags: list[str], schema: Mapping[str, Any]) -> dict[str, object]:
    """The arguments in texts that begin with a tag each, but for the first. Raises MalformedCallError."""
    open_elements = [_Element("", "", schema)]
    for text in tags[1:]:
        tag, closed, rest = text.partition(">")
        parent = open_elements[-1]
        if not closed or not tag.startswith("<"):
            raise MalformedCallError(f"no tag: {text[:20]!r}")
        if tag != f"</{parent.tag}":
            open_elements.append(_Element(tag[1:], rest, parent.schema_of(tag[1:])))
        elif len(open_elements) > 1:
            open_elements.pop()
            open_elements[-1].children.append((parent.tag, parent.value()))
    if len(open_elements) > 1:
        raise MalformedCallError(f"no end of {open_elements[-1].tag!r}")
    return _object(open_elements[0].children)


def _object(children: list[tuple[str, object]]) -> dict[str, object]:
    """An object of elements by their tags; those with the same tag are an array."""
    by_tag: dict[str, list[object]] = {}
    for tag, value in children:
        by_tag.setdefault(tag, []).append(value)
    return {tag: values if len(values) > 1 else values[0] for tag, values in by_tag.items()}
