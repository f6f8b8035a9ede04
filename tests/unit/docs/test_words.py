"""Names of tests and classes, comments and docstrings keep the rules of CONTRIBUTING's part about prose."""

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
AVOIDED = re.compile(r"\b(?:beside|whoever|nobody|everybody)\b|, too\b(?! \w)")
PROSE = re.compile(r'"""|^ *#|  # ')  # lines of a source with prose in them
CLASS = re.compile(r" *class ([^\W_]\w*)[(:]")
FRAGMENT = re.compile(r'\S {2}# of |(?:"""|^ *# | {2}# )(?:[Ww]hat|[Ww]ho|[Ww]hose|[Ww]hatever) ')
CODE = ("services", "tests", "bench", "clients", "deploy", "docs", "charts", "loadtest", "proto")
MADE = "clients/python/ryzanstein_client/*/client.py"  # from aio.py


def sources(*folders: str) -> list[Path]:
    files = (file for folder in folders for file in sorted((PROJECT / folder).rglob("*.py")))
    return [file for file in files if not file.match(MADE)]


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


def test_comments_and_docstrings_are_no_fragments() -> None:
    lines = (
        f"{file.relative_to(PROJECT)}:{number}: {line.strip()}"
        for file in sources(*CODE)
        for number, line in enumerate(file.read_text().splitlines(), 1)
        if FRAGMENT.search(line)
    )
    assert list(lines) == []


def avoided(file: Path) -> list[str]:
    """The lines of a file whose prose has a word to avoid; in Python, comments and the first lines of docstrings."""
    return [
        f"{file.relative_to(PROJECT)}:{number}: {line.strip()}"
        for number, line in enumerate(file.read_text().splitlines(), 1)
        if (match := AVOIDED.search(line))
        and (file.suffix != ".py" or ((prose := PROSE.search(line)) and prose.start() < match.start()))
    ]


def test_values_have_names_of_their_own() -> None:
    assert [f"{file}:{line}" for file in sources(*CODE) for line in vague_names(file.read_text())] == []


def test_prose_has_the_usual_words() -> None:
    pages = [PROJECT / "README.md", *(PROJECT / "docs").rglob("*.md"), *(PROJECT / "proto").rglob("*.proto")]
    chart = PROJECT / "charts" / "ryzanstein"
    pages += [chart / "values.yaml", chart / "README.md", *(chart / "templates").rglob("*.*")]
    assert [line for file in [*pages, *sources(*CODE)] if file.name != "test_words.py" for line in avoided(file)] == []


def test_vague_names_are_detected() -> None:
    assert vague_names("def f(asked):\n    found = 1\n    for kept in found:\n        said.x = kept") == [1, 2, 3]


def test_public_class_names_are_unique() -> None:
    """Those of services and of their tests; each client in `tests/e2e/clients` is a program of its own."""
    files = [file for file in sources("services", "tests") if not file.is_relative_to(PROJECT / "tests/e2e/clients")]
    texts = {str(file.relative_to(PROJECT)): file.read_text() for file in files}
    assert repeated_classes(texts) == {}


def test_repeated_class_names_are_detected() -> None:
    sources = {"a.py": "class Plan: ...\nclass _Row: ...", "b.py": "def f():\n    class Plan: ...\nclass _Row: ..."}
    assert repeated_classes(sources) == {"Plan": ["a.py:1", "b.py:2"]}


def test_pronouns_and_fragments_are_detected() -> None:
    for name in ("test_what_is_wrong_is_named", "test_a_file_is_itself", "test_nobody_waits", "test_ranks_equal_ones"):
        assert PRONOUN.search(name), name
    for name in ("test_a_limit_is_named", "test_every_item_is_read", "test_one_worker_is_chosen"):
        assert not PRONOUN.search(name), name
    for line in (f"size = 1  {'#'} of a block", f"size = 1  {'#'} what a worker takes", '    """' + "What it does."):
        assert FRAGMENT.search(line), line
    assert not FRAGMENT.search("size = 1  # block size")
