"""Rewrites how many and which properties an object has, so that llguidance enforces it, or refuses the schema.

llguidance counts a name that a text repeats as two, counts properties only where all named ones are required, and needs
patterns without look-ahead. Where nothing expresses the schema exactly, ValueError names the place.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import combinations
from math import comb
from typing import Any

from services.gateway.grammar.names import names_of
from services.gateway.grammar.patterns import followable
from services.gateway.grammar.subschemas import Node, combined, escaped, walk

_MOST_BRANCHES = 64  # alternatives for the properties that an answer has
_EVERY_NAME = re.compile(r"\^?(?:\.\*|\[\\s\\S\]\*)?|(?:\.\*|\[\\s\\S\]\*)?\$?|\^\[\\s\\S\]\*\$")
_ALSO = frozenset({"allOf", "$ref"})


def name_few(root: Node) -> None:
    """Replace patterns that match few names by these names, and those that match all by the empty one, in place."""
    for _, node in walk(root):
        patterns = node.get("patternProperties", {})
        for pattern in list(patterns):
            names = names_of(pattern)
            if names is not None:
                schema, known = patterns.pop(pattern), node.setdefault("properties", {})
                node["properties"] = known | {name: _both(known.get(name, True), schema) for name in names}
            elif _EVERY_NAME.fullmatch(pattern):
                schema = patterns.pop(pattern)
                patterns[""] = _both(patterns.get("", True), schema)
                node["additionalProperties"] = False  # there are no others
        if not node.get("patternProperties", True):
            del node["patternProperties"]


def follow_patterns(pointer: str, node: Node) -> None:
    """Rewrite the patterns of names without look-ahead, in place; raises ValueError for those that nothing follows."""
    patterns = node.get("patternProperties", {})
    open_to_all = node.get("additionalProperties", True) in (True, {})
    for pattern in list(patterns):
        followed = followable(pattern) or []
        parts = [part for part in followed if part != "^"] or followed
        schema = patterns.pop(pattern)
        if len(parts) == 1:
            patterns[parts[0]] = _both(patterns.get(parts[0], True), schema)
        elif not (open_to_all and schema in (True, {})):
            path = f"{pointer}/patternProperties/{escaped(pattern)}"
            raise ValueError(f"`{path}` has look-around, `\\b` or a reference back, which no grammar follows in names")
    for keyword in ("patternProperties", "additionalProperties"):
        if patterns and keyword in node:  # llguidance reads both together only where no other keyword is between them
            node[keyword] = node.pop(keyword)


def count_properties(root: Node, pointer: str, node: Node, *, shared: bool) -> list[str]:
    """Rewrite `minProperties` and `maxProperties` in place; returns the one that needs a check of the finished text.

    `shared`: other schemas describe the same object. Raises ValueError where no grammar comes near the counts.
    """
    counts: Node = {keyword: node.pop(keyword) for keyword in ("minProperties", "maxProperties") if keyword in node}
    if "object" not in (node.get("type") or "object"):
        return []
    required = {name for part in combined(root, node, keywords=_ALSO) for name in part.get("required", ())}
    named = [name for name, schema in node.get("properties", {}).items() if schema is not False]
    closed = node.get("additionalProperties") is False and not node.get("patternProperties")
    if counts.get("minProperties", 0) <= len(required):
        counts.pop("minProperties", None)
    if closed and counts.get("maxProperties", 0) >= len({*named, *required}):
        counts.pop("maxProperties", None)
    if not counts:
        return []
    several = shared or node.keys() & {"allOf", "anyOf", "$ref"}
    optional = [name for name in named if name not in required]
    count = _Count(sorted(required), optional, counts.get("minProperties", 0), counts.get("maxProperties"), closed)
    branches = None if several else count.branches()
    if branches is None:
        keyword, reason = next(iter(counts)), "several schemas describe the object" if several else count.reason
        raise ValueError(f"`{pointer}/{keyword}` is {counts[keyword]}, which no grammar enforces where {reason}")
    node |= {"anyOf": branches} if branches else counts
    return ["minProperties"] if not closed and count.missing > 1 else []  # a name that a text repeats counts as two


@dataclass(frozen=True, slots=True)
class _Count:
    """An object's names, and how many properties it may have; `closed`: it has no others."""

    required: list[str]
    optional: list[str]
    least: int
    most: int | None
    closed: bool

    @property
    def reason(self) -> str:
        """The case in which there are no branches."""
        if self.closed:
            return f"more than {_MOST_BRANCHES} choices of properties fit"
        return "some of the properties are optional, and a text may have others"

    @property
    def missing(self) -> int:
        """Properties needed in addition to the required ones."""
        return max(self.least - len(self.required), 0)

    def branches(self) -> list[Node] | None:
        """Schemas of which one must hold; none if llguidance enforces the counts; None if nothing does."""
        spare = None if self.most is None else self.most - len(self.required)
        if self.closed and (not self.optional or (self.missing <= 1 and spare in (None, 1))):
            return []
        if spare is not None and spare < self.missing:
            return []  # a contradiction, which llguidance reports
        if not self.optional:
            return []
        if not self.closed and self.missing > 1:
            return None
        if comb(len(self.optional), self.missing) > _MOST_BRANCHES or (spare is not None and len(self.optional) > 6):
            return None
        return self._with_others() if spare is None else self._exactly(spare)

    def _with_others(self) -> list[Node]:
        """A branch for each choice of needed properties, which allows further ones."""
        branches = [{"required": [*self.required, *names]} for names in combinations(self.optional, self.missing)]
        return branches if self.closed else [*branches, self._only((), minProperties=self.least)]

    def _exactly(self, spare: int) -> list[Node]:
        """A branch for each choice of listed properties that an answer has."""
        branches = []
        for size in range(self.missing if self.closed else 0, min(spare, len(self.optional)) + 1):
            counts = {} if self.closed else {"minProperties": self.least, "maxProperties": self.most}
            branches += [self._only(names, **counts) for names in combinations(self.optional, size)]
        return branches

    def _only(self, names: tuple[str, ...], **counts: int | None) -> Node:
        left_out = dict.fromkeys((name for name in self.optional if name not in names), False)
        return {"properties": left_out, "required": [*self.required, *names], **counts}


def is_open(node: Node) -> bool:
    """Whether a schema describes some names and allows others."""
    names = node.get("properties") or node.get("patternProperties") or node.get("required")
    return bool(names) and node.get("additionalProperties") is not False


def _both(one: Any, other: Any) -> Any:
    """A schema of values that are valid by both."""
    if True in (one, other):
        return other if one is True else one
    return {"allOf": [one, other]}
