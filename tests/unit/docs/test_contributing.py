"""CONTRIBUTING's table of import rules is the one that import-linter enforces."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parents[3]
ROW = re.compile(r"^\| (?P<name>[^|]+) \| (?P<rule>[^|]+) \|$", re.MULTILINE)


def short(modules: list[str]) -> str:
    return ", ".join(f"`{module.removeprefix('services.')}`" for module in modules)


def floor(layer: str, container: str = "") -> str:
    return short([f"{container}{module}" for module in re.split(r" [|:] ", layer)])


def rule(contract: dict[str, Any]) -> str:
    if contract["type"] == "layers":
        container = "".join(f"{name}." for name in contract.get("containers", ()))
        return " → ".join(floor(layer, container) for layer in contract["layers"])
    if contract["type"] == "independence":
        return short(contract["modules"])
    return f"{short(contract['source_modules'])} never {short(contract['forbidden_modules'])}"


def test_the_table_of_import_rules_is_the_enforced_one() -> None:
    """What is to stand there is what pytest shows on the right."""
    page = (PROJECT / "CONTRIBUTING.md").read_text()
    section = page.split("### What may import what\n")[1].split("\n## ")[0]
    contracts = tomllib.loads((PROJECT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    written = [f"| {row['name']} | {row['rule']} |" for row in ROW.finditer(section)][1:]  # without the heading
    assert written == [f"| {contract['name']} | {rule(contract)} |" for contract in contracts]
