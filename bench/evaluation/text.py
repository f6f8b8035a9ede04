"""Held-out documents, and how a long one is cut into scored windows."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Document:
    """One held-out text."""

    path: str
    group: str
    text: str


@dataclass(frozen=True)
class Window:
    """A prompt of which only the tokens from `first` on are scored; those before them are context."""

    ids: tuple[int, ...]
    first: int


def read_documents(path: Path, limit: int = 0) -> list[Document]:
    """The documents of a JSON-lines file of `path`, `group`, `text`; the first `limit` ones, 0 for all."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [Document(**json.loads(line)) for line in (lines[:limit] if limit else lines)]


def cut(ids: Sequence[int], context: int, stride: int) -> Iterator[Window]:
    """Windows of at most `context` tokens that score every token but the first exactly once.

    The first window scores all it holds, each later one `stride` tokens that see `context - stride` before them.
    """
    done = 1  # nothing is before the first token, so it has no probability
    while done < len(ids):
        last = min(len(ids), context if done == 1 else done + stride)
        begin = max(0, last - context)
        yield Window(tuple(ids[begin:last]), done - begin)
        done = last
