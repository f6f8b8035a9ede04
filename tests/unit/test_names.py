"""A name of services/ means one thing: whoever greps for a class finds one."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

SERVICES = Path(__file__).resolve().parents[2] / "services"
# A captured step has sizes and memory of its own on each kind of device: backends do not know each other.
SHARED = {"Memory", "Sizes"}


def public_classes() -> dict[str, list[str]]:
    """Where classes are defined, by name."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted(SERVICES.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(f"{path.relative_to(SERVICES.parent)}:{node.lineno}")
    return found


def test_no_two_public_classes_share_a_name() -> None:
    classes = public_classes()
    assert len(classes) > 500  # all of services/ was read
    assert {name: places for name, places in classes.items() if len(places) > 1 and name not in SHARED} == {}
