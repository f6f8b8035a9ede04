"""Finds the schemas inside a JSON Schema: below keywords and behind references."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

Node = dict[str, Any]

_ONE = ("additionalItems", "additionalProperties", "contains", "else", "if", "not", "propertyNames", "then")
_ONE_MORE = ("items", "unevaluatedItems", "unevaluatedProperties")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")

ANNOTATIONS = frozenset(
    {
        *("$comment", "$defs", "$id", "$schema", "contentEncoding", "contentMediaType", "contentSchema", "default"),
        *("definitions", "deprecated", "description", "discriminator", "example", "examples", "readOnly", "title"),
        "writeOnly",
    }
)


def children(node: Node) -> Iterator[tuple[str, Node]]:
    """The schemas directly below a schema, each with its path."""
    for keyword in (*_ONE, *_ONE_MORE):
        if isinstance(node.get(keyword), dict):
            yield keyword, node[keyword]
    for keyword in _LISTS:
        if isinstance(node.get(keyword), list):
            yield from ((f"{keyword}/{i}", part) for i, part in enumerate(node[keyword]) if isinstance(part, dict))
    for keyword in _MAPS:
        if isinstance(node.get(keyword), dict):
            yield from ((f"{keyword}/{escaped(k)}", v) for k, v in node[keyword].items() if isinstance(v, dict))


def walk(root: Node) -> Iterator[tuple[str, Node]]:
    """Every schema with its JSON pointer, once, parents first, including schemas that only a `$ref` reaches.

    The generator reads a schema's children only after the caller has had it, so the caller may change the schema.
    """
    seen: set[int] = set()
    waiting = [("", root)]
    while waiting:
        pointer, node = waiting.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        yield pointer, node
        if (target := target_of(root, node)) is not None:
            waiting.append((node["$ref"].removeprefix("#"), target))
        waiting += reversed([(f"{pointer}/{way}", child) for way, child in children(node)])


def target_of(root: Node, node: Node) -> Node | None:
    """The target of a `$ref` into the same document, if there is one."""
    reference = node.get("$ref")
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    target: Any = root
    for token in reference.split("/")[1:]:
        key = token.replace("~1", "/").replace("~0", "~")
        if isinstance(target, Mapping):
            target = target.get(key)
        elif isinstance(target, list) and key.isdecimal() and int(key) < len(target):
            target = target[int(key)]
        else:
            return None
    return target if isinstance(target, dict) and (reference == "#" or "/" in reference) else None


def applied(root: Node, node: Node) -> Iterator[tuple[str, Node]]:
    """The schemas that also describe the value of `node`, each with the keyword that applies it."""
    for keyword in ("allOf", "anyOf", "oneOf"):
        yield from ((keyword, part) for part in node.get(keyword, ()) if isinstance(part, dict))
    for keyword in ("then", "else"):
        if isinstance(node.get(keyword), dict):
            yield keyword, node[keyword]
    yield from (
        ("dependentSchemas", part) for part in node.get("dependentSchemas", {}).values() if isinstance(part, dict)
    )
    if (target := target_of(root, node)) is not None:
        yield "$ref", target


def combined(root: Node, node: Node, *, keywords: frozenset[str] | None = None) -> list[Node]:
    """`node` and all schemas that describe the same value, through any of `keywords`."""
    seen: dict[int, Node] = {}
    waiting = [node]
    while waiting:
        part = waiting.pop()
        if id(part) not in seen:
            seen[id(part)] = part
            waiting += [further for keyword, further in applied(root, part) if keywords is None or keyword in keywords]
    return list(seen.values())


def resolved(root: Node, node: object) -> Node:
    """Follow the references of schemas that have only a `$ref`; {} if the result is no object."""
    for _ in range(16):  # references may be circular
        if not isinstance(node, dict):
            return {}
        if node.keys() - ANNOTATIONS != {"$ref"} or (target := target_of(root, node)) is None:
            return node
        node = target
    return {}


def escaped(key: str) -> str:
    """A key as a token of a JSON pointer."""
    return key.replace("~", "~0").replace("/", "~1")
