"""The training text: sources and documentation of the Python standard library on this machine.

Files are split into train and held-out by a seeded hash of their path relative to the library's folder.
"""

from __future__ import annotations

import ast
import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

# site-packages is not the standard library; the encodings and the grammar tables are numbers, not language;
# the topics are read as documents of their own.
EXCLUDED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__", "encodings", "lib2to3", "cjkencodings"})
TOPICS_FILE = Path("pydoc_data/topics.py")
MAX_FILE_BYTES = 400_000


class Group(StrEnum):
    """What a document is; the recipe gives each group its share of the training tokens."""

    LIBRARY = "library"
    TESTS = "tests"
    DOCUMENTATION = "documentation"
    CHAT = "chat"


@dataclass(frozen=True)
class CorpusText:
    """One text and where it came from. `path` is relative to the library; topics add `#name`."""

    path: str
    group: Group
    text: str


@dataclass(frozen=True)
class Split:
    """Documents by the side they fell on."""

    train: tuple[CorpusText, ...]
    held_out: tuple[CorpusText, ...]


def library_root() -> Path:
    """Folder of the running interpreter's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def is_held_out(path: str, seed: int, percent: float) -> bool:
    """Whether `path` falls on the held-out side: a hash of seed and path, so it never depends on other files."""
    digest = hashlib.sha256(f"{seed}:{path}".encode()).digest()
    return int.from_bytes(digest[:8], "big") < percent / 100 * 2**64


def read_source_files(root: Path) -> Iterator[CorpusText]:
    """Python files below `root` in path order, skipping duplicates, empty files and tables.

    Files that are not UTF-8 are skipped: they are tests of decoding, not text to learn.
    """
    seen: set[str] = set()
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if EXCLUDED_FOLDERS & set(relative.parts) or relative == TOPICS_FILE:
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        digest = hashlib.sha256(text.encode()).hexdigest()
        if not text.strip() or len(text) > MAX_FILE_BYTES or digest in seen:
            continue
        seen.add(digest)
        is_test = bool({"test", "tests", "idle_test"} & set(relative.parts))
        yield CorpusText(relative.as_posix(), Group.TESTS if is_test else Group.LIBRARY, text)


def read_topics(root: Path) -> Iterator[CorpusText]:
    """The language reference topics that `help()` shows, one document each."""
    tree = ast.parse((root / TOPICS_FILE).read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            topics: dict[str, str] = ast.literal_eval(node.value)
            for name, text in sorted(topics.items()):
                yield CorpusText(f"{TOPICS_FILE.as_posix()}#{name}", Group.DOCUMENTATION, text.strip() + "\n")


def docstring_pages(document: CorpusText) -> Iterator[CorpusText]:
    """One page of reference text per documented source file: each signature followed by its docstring."""
    if document.group is not Group.LIBRARY:
        return
    entries = [f"{entry.heading}\n\n{entry.doc}\n" for entry in documented(document)]
    if entries:
        yield CorpusText(f"{document.path}#docstrings", Group.DOCUMENTATION, "\n".join(entries))


@dataclass(frozen=True)
class Entry:
    """A documented module, class or function of one source file."""

    kind: str
    name: str
    heading: str
    doc: str
    source: str


def module_name(path: str) -> str:
    """Dotted module name of a relative path."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def documented(document: CorpusText) -> list[Entry]:
    """Everything with a docstring in one file, in order; nothing for files this interpreter cannot parse."""
    try:
        tree = ast.parse(document.text)
    except SyntaxError:
        return []
    module = module_name(document.path)
    entries: list[Entry] = []
    if doc := ast.get_docstring(tree):
        entries.append(Entry("module", module, f"module {module}", doc, ""))
    _collect(tree, module, document.text.splitlines(keepends=True), entries)
    return entries


def _collect(parent: ast.Module | ast.ClassDef, prefix: str, lines: list[str], entries: list[Entry]) -> None:
    for node in parent.body:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        name = f"{prefix}.{node.name}"
        if doc := ast.get_docstring(node):
            entries.append(_entry(node, name, doc, lines))
        if isinstance(node, ast.ClassDef):
            _collect(node, name, lines, entries)


def _entry(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef, name: str, doc: str, lines: list[str]) -> Entry:
    if isinstance(node, ast.ClassDef):
        return Entry("class", name, f"class {name}", doc, "")
    source = "".join(lines[node.lineno - 1 : node.end_lineno])
    return Entry("function", name, f"{name}({ast.unparse(node.args)})", doc, source)


def read_library(root: Path) -> list[CorpusText]:
    """All documents: sources, tests, topics, and a reference page for each documented source file."""
    sources = list(read_source_files(root))
    pages = [page for document in sources for page in docstring_pages(document)]
    return [*sources, *read_topics(root), *pages]


def split(documents: list[CorpusText], seed: int, percent: float = 4.0) -> Split:
    """Splits by file: a page of docstrings goes wherever the file it was taken from goes.

    Topics all live in one file, so each topic is its own unit.
    """
    train: list[CorpusText] = []
    held_out: list[CorpusText] = []
    for document in documents:
        unit = document.path.removesuffix("#docstrings")
        (held_out if is_held_out(unit, seed, percent) else train).append(document)
    return Split(tuple(train), tuple(held_out))
