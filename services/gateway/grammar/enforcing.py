"""Rewrites a JSON Schema to the keywords that llguidance enforces, and lists those that it cannot enforce.

A keyword without effect is dropped, and a keyword that others can express is replaced by them. All other unsupported
keywords are removed: the grammar then allows more than the schema, and the finished text is checked.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import permutations
from typing import Any

from services.gateway.grammar.alternatives import merge_one_of, values_of
from services.gateway.grammar.closing import close_objects
from services.gateway.grammar.numbers import make_exact
from services.gateway.grammar.patterns import followable
from services.gateway.grammar.properties import count_properties, follow_patterns, name_few
from services.gateway.grammar.subschemas import ANNOTATIONS, Node, resolved, walk

# The formats that llguidance enforces. JSON Schema treats all others as annotations.
FORMATS = frozenset(["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"])
_DIALECT = re.compile(
    r"http://json-schema\.org/draft-0[3467]/schema#?|https://json-schema\.org/draft/20(19-09|20-12)/schema#?"
)
_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:[^\s\[\]#]+|[\w./-]+")
# These formats require a time zone, which zod's patterns of local times forbid. A pattern of the whole text wins.
_ZONED = frozenset({"time", "date-time"})
_HEX = "[0-9a-fA-F]"
_NAME_FORMATS = {
    "date": "^[0-9]{4}-(?:0[1-9]|1[0-2])-(?:0[1-9]|[12][0-9]|3[01])$",
    "uuid": f"^{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}$",
}
_MOST_UNIQUE = 4  # values whose arrangements are listed: 65
# {keyword: its value without effect}
_NOT_ENFORCED: dict[str, Any] = {
    "not": False,
    "contains": True,
    "dependentRequired": {},
    "dependentSchemas": {},
    "dependencies": {},
    "unevaluatedProperties": True,
    "unevaluatedItems": True,
    "$dynamicRef": None,
    "$recursiveRef": None,
}
_SILENT = ("minContains", "maxContains", "$dynamicAnchor", "$recursiveAnchor")


@dataclass(frozen=True, slots=True)
class Unenforced:
    """A keyword that the grammar does not enforce, and its place in the schema."""

    keyword: str
    pointer: str

    def __str__(self) -> str:
        return f"`{self.keyword}` at `{self.pointer or '/'}`"


def forget_dialects(root: Node) -> None:
    """Drop a `$schema` that names no known dialect and an `$id` that is no URI, in place."""
    for _, node in walk(root):
        if "$schema" in node and not _DIALECT.fullmatch(str(node["$schema"])):
            del node["$schema"]
        if "$id" in node and not _URI.fullmatch(str(node["$id"])):
            del node["$id"]


def enforce(root: Node, *, closed: bool) -> tuple[Unenforced, ...]:
    """Rewrite a schema in place; `closed`: an object without `additionalProperties` allows only named properties.

    Raises ValueError with the place of what is neither enforced nor left to the check of the finished text.
    """
    name_few(root)
    # Must come before objects are closed: closing could make alternatives look distinct.
    unenforced = [
        Unenforced("oneOf", at) for at, node in walk(root) if "oneOf" in node and not merge_one_of(root, node)
    ]
    shared = close_objects(root, by_default=closed)
    for pointer, node in walk(root):
        make_exact(root, pointer, node)
        keywords = [keyword for rewrite in _REWRITES for keyword in rewrite(root, node)]
        follow_patterns(pointer, node)
        keywords += count_properties(root, pointer, node, shared=id(node) in shared)
        unenforced += [Unenforced(keyword, pointer) for keyword in keywords]
    return tuple(unenforced)


def _drop_format(root: Node, node: Node) -> list[str]:
    pattern = str(node.get("pattern", ""))
    whole = pattern.startswith("^") and pattern.endswith("$")
    if "format" in node and (str(node["format"]) not in FORMATS or (whole and node["format"] in _ZONED)):
        del node["format"]
    return []


def _match(root: Node, node: Node) -> list[str]:
    """Replace a pattern by patterns without look-ahead."""
    unenforced = []
    if isinstance(node.get("pattern"), str):
        patterns = followable(node.pop("pattern"))
        if patterns is None:
            unenforced.append("pattern")
        else:
            *others, node["pattern"] = patterns
            if others:
                node.setdefault("allOf", []).extend({"pattern": pattern} for pattern in others)
    return unenforced


def _name_properties(root: Node, node: Node) -> list[str]:
    """Replace `propertyNames` by the properties or patterns that it allows."""
    if "propertyNames" not in node:
        return []
    names = node.pop("propertyNames")
    about = resolved(root, names)
    says = about.keys() - ANNOTATIONS
    if about.get("type", "string") == "string":
        says -= {"type"}
    if says == {"format"} and str(about["format"]) in _NAME_FORMATS:
        about, says = {"pattern": _NAME_FORMATS[str(about["format"])]}, {"pattern"}
    says -= {"format"}
    if names is not False and not says:
        return []
    if node.get("patternProperties"):
        return ["propertyNames"]
    values = [] if names is False else values_of(root, about)
    if values is not None:
        known, others = node.get("properties", {}), node.get("additionalProperties", True)
        node["properties"] = {name: known.get(name, others) for name in values if isinstance(name, str)}
        node["additionalProperties"] = False
        return []
    patterns = followable(about["pattern"]) if says == {"pattern"} and isinstance(about["pattern"], str) else None
    if says <= {"minLength", "maxLength"}:
        patterns = [rf"^[\s\S]{{{about.get('minLength', 0)},{about.get('maxLength', '')}}}$"]
    if patterns is None or len(patterns) > 1 or node.get("properties"):
        return ["propertyNames"]
    node["patternProperties"] = {patterns[0]: node.get("additionalProperties", True)}
    node["additionalProperties"] = False
    return []


def _repeat_nothing(root: Node, node: Node) -> list[str]:
    """Replace `uniqueItems` by a list of all valid arrays, when they are few."""
    if node.pop("uniqueItems", False) is not True or node.get("maxItems", 2) in (0, 1):
        return []
    values = values_of(root, node.get("items"))
    plain = node.get("type") == "array" and not node.keys() & {"prefixItems", "anyOf", "contains", "$ref"}
    if values is None or not plain or len({json.dumps(value) for value in values}) > _MOST_UNIQUE:
        return ["uniqueItems"]
    distinct = [json.loads(text) for text in dict.fromkeys(map(json.dumps, values))]
    least, most = node.pop("minItems", 0), min(node.pop("maxItems", len(distinct)), len(distinct))
    del node["items"]
    node["anyOf"] = [
        {"type": "array", "prefixItems": [{"const": value} for value in items], "items": False, "minItems": length}
        for length in range(least, most + 1)
        for items in permutations(distinct, length)
    ]
    return []


def _leave_out(root: Node, node: Node) -> list[str]:
    """Remove the keywords that no grammar enforces."""
    for keyword in _SILENT:
        node.pop(keyword, None)
    unenforced = [keyword for keyword, nothing in _NOT_ENFORCED.items() if node.get(keyword, nothing) != nothing]
    condition, then, other = node.pop("if", None), node.pop("then", True), node.pop("else", True)
    if condition is not None and (then, other) != (True, True):
        unenforced.append("if")
    for keyword in _NOT_ENFORCED:
        node.pop(keyword, None)
    return unenforced


_Rewrite = Callable[[Node, Node], list[str]]
_REWRITES: tuple[_Rewrite, ...] = (
    _drop_format, _match, _name_properties, _repeat_nothing, _leave_out
)  # fmt: skip
