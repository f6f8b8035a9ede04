"""Names of tests and classes and trailing comments keep the rules of CONTRIBUTING's part about prose."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[3]

NAME = re.compile(r"^ *(?:async )?def (test_\w+)\(", re.MULTILINE)
PRONOUN = re.compile(
    r"_(?:who|whom|whose|whoever|what|whatever|it|itself|they|them|he|she|we|us|you|"
    r"no_one|(?:no|any|every|some)(?:thing|body)|(?:any|every|some)one|ones|others|those_(?:that|who))(?=_|$)"
)
VAGUE = ("found", "asked", "said", "kept")  # a result has the name of its value
CLASS = re.compile(r" *class ([^\W_]\w*)[(:]")
FRAGMENT = re.compile(r"\S {2}# of ")


def sources(*folders: str) -> list[Path]:
    return [file for folder in folders for file in sorted((PROJECT / folder).rglob("*.py"))]


def repeated_classes(sources: Mapping[str, str]) -> dict[str, list[str]]:
    """The public classes that several places define, each with these places; `sources` are texts by path."""
    places = defaultdict[str, list[str]](list)
    for path, source in sources.items():
        for number, line in enumerate(source.splitlines(), 1):
            if defined := CLASS.match(line):
                places[defined[1]].append(f"{path}:{number}")
    return {name: where for name, where in places.items() if len(where) > 1}


def vague_names(source: str) -> list[int]:
    """The lines that assign to a vague name, a class's field included, or take an argument of it."""
    nodes = ast.walk(ast.parse(source)) if any(name in source for name in VAGUE) else ()
    return sorted(
        node.lineno
        for node in nodes
        if (isinstance(node, ast.arg) and node.arg in VAGUE)
        or (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in VAGUE)
    )


def test_test_names_have_no_pronouns() -> None:
    names = ((file, name) for file in sources("tests") for name in NAME.findall(file.read_text()))
    assert [f"{file.relative_to(PROJECT)}: {name}" for file, name in names if PRONOUN.search(name)] == []


def test_trailing_comments_stand_alone() -> None:
    lines = (
        f"{file.relative_to(PROJECT)}:{number}: {line.strip()}"
        for file in sources("services", "bench", "tests")
        for number, line in enumerate(file.read_text().splitlines(), 1)
        if FRAGMENT.search(line)
    )
    assert list(lines) == []


def test_values_of_services_have_names_of_their_own() -> None:
    assert [f"{file}:{line}" for file in sources("services") for line in vague_names(file.read_text())] == []


def test_vague_names_are_detected() -> None:
    assert vague_names("def f(asked):\n    found = 1\n    for kept in found:\n        said.x = kept") == [1, 2, 3]


def test_public_class_names_are_unique_in_services() -> None:
    texts = {str(file.relative_to(PROJECT)): file.read_text() for file in sources("services")}
    assert repeated_classes(texts) == {}


def test_repeated_class_names_are_detected() -> None:
    sources = {"a.py": "class Plan: ...\nclass _Row: ...", "b.py": "def f():\n    class Plan: ...\nclass _Row: ..."}
    assert repeated_classes(sources) == {"Plan": ["a.py:1", "b.py:2"]}


def test_pronouns_and_fragments_are_detected() -> None:
    for name in ("test_what_is_wrong_is_named", "test_a_file_is_itself", "test_nobody_waits", "test_ranks_equal_ones"):
        assert PRONOUN.search(name), name
    for name in ("test_a_limit_is_named", "test_every_item_is_read", "test_one_worker_is_chosen"):
        assert not PRONOUN.search(name), name
    assert FRAGMENT.search(f"size = 1  {'#'} of a block")
    assert not FRAGMENT.search("size = 1  # block size")
