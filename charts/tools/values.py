"""values.yaml read with its comments.

The comment above a key describes it; what follows `@schema` in it, a map of YAML in one line, adds to its JSON Schema.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml


@dataclass(frozen=True)
class Value:
    """One key: its default, what its comment says, and its keys if it is a map of ours.

    `ours` is false for a map in one line: such a map is Kubernetes' own, and its keys are not described here.
    """

    key: str
    default: Any
    description: str
    schema: dict[str, Any]
    ours: bool
    children: tuple[Value, ...]

    def child(self, *path: str) -> Value:
        """The value at `path` below this one; raises StopIteration when there is none."""
        if not path:
            return self
        return next(child for child in self.children if child.key == path[0]).child(*path[1:])


def read(path: Path) -> Value:
    """The whole file as one value with an empty key."""
    text = path.read_text()
    return _value("", yaml.compose(text), {}, text.splitlines(), ())


def _value(key: str, node: yaml.Node, schema: dict[str, Any], lines: list[str], description: tuple[str, ...]) -> Value:
    ours = isinstance(node, yaml.MappingNode) and not node.flow_style
    children = [_child(name, child, lines) for name, child in node.value] if ours else []
    default = yaml.safe_load(yaml.serialize(node))
    return Value(key, default, " ".join(description), schema, ours, tuple(children))


def _child(name: yaml.ScalarNode, node: yaml.Node, lines: list[str]) -> Value:
    comment = _comment_above(name.start_mark.line, lines)
    description, _, schema = " ".join(comment).partition("@schema ")
    return _value(name.value, node, yaml.safe_load(schema) if schema else {}, lines, (description.strip(),))


def _comment_above(line: int, lines: list[str]) -> list[str]:
    """The lines of comment directly above, without their #."""
    first = line
    while first > 0 and lines[first - 1].lstrip().startswith("#"):
        first -= 1
    return [text.strip().removeprefix("#").strip() for text in lines[first:line]]
