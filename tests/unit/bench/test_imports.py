"""Moves in services/, clients/ or tests/ break no bench and no load test unseen."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[3]


def modules(folder: str) -> list[str]:
    files = sorted((PROJECT / folder).rglob("*.py"))
    names = [".".join(file.relative_to(PROJECT).with_suffix("").parts) for file in files]
    return [name.removesuffix(".__init__") for name in names]


def test_a_bench_can_be_imported() -> None:
    for name in modules("bench"):
        importlib.import_module(name)


def defined_in(module: str) -> set[str]:
    """The names at the top of one of locust's modules, which are not imported here: locust patches sockets."""
    path = PROJECT / module.replace(".", "/")
    tree = ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text())
    named = {node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)}
    assigned = (node for node in tree.body if isinstance(node, ast.Assign))
    return named | {target.id for node in assigned for target in node.targets if isinstance(target, ast.Name)}


def test_our_modules_imported_by_load_tests_exist() -> None:
    for name in modules("loadtest"):
        assert_imports_are_there(name)


def assert_imports_are_there(name: str) -> None:
    path = PROJECT / name.replace(".", "/")
    tree = ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text())
    for node in (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)):
        module, names = str(node.module), {alias.name for alias in node.names}
        if module.split(".")[0] == "loadtest":
            assert names <= defined_in(module), module
        elif module.split(".")[0] in ("bench", "ryzanstein", "ryzanstein_client", "services", "tests"):
            actual = importlib.import_module(module)
            assert [each for each in names if not hasattr(actual, each)] == [], module
