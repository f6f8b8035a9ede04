"""The table of values in the chart's README.md."""

from __future__ import annotations

import json
from collections.abc import Iterator

from charts.tools.values import Value

BEGIN, END = "<!-- values -->", "<!-- end of values -->"


def write(text: str, root: Value) -> str:
    """`text` with the table between its two marks made anew."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{''.join(_sections(root))}{END}{after}"


def _sections(root: Value) -> Iterator[str]:
    scalars = [child for child in root.children if not child.children]
    yield _table("In general", "", [("", child) for child in scalars])
    for child in root.children:
        if child.children:
            yield _table(f"`{child.key}`", child.description, list(_leaves(child, f"{child.key}.")))


def _leaves(value: Value, prefix: str) -> Iterator[tuple[str, Value]]:
    for child in value.children:
        if child.children:
            yield from _leaves(child, f"{prefix}{child.key}.")
        else:
            yield prefix, child


def _table(title: str, description: str, rows: list[tuple[str, Value]]) -> str:
    about = f"{description}\n\n" if description else ""
    lines = "".join(_row(prefix, value) for prefix, value in rows)
    return f"\n### {title}\n\n{about}| value | default | meaning |\n|---|---|---|\n{lines}\n"


def _row(prefix: str, value: Value) -> str:
    default = value.default if isinstance(value.default, str) and value.default else json.dumps(value.default)
    choices = value.schema.get("enum", [])
    one_of = f"one of {', '.join(str(choice) or 'empty' for choice in choices)}" if choices else ""
    meaning = " ".join(filter(None, [value.description, f"({one_of})" if one_of else ""])).replace("|", "\\|")
    return f"| `{prefix}{value.key}` | `{default}` | {meaning} |\n"
