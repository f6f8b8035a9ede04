"""Held-out documents, and their division into scored windows."""

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
    """A prompt whose tokens are scored from `first` on; earlier tokens are context."""

    ids: tuple[int, ...]
    first: int


def read_documents(path: Path, limit: int = 0) -> list[Document]:
    """The first `limit` documents (0: all) of a JSON-lines file with the fields `path`, `group`, `text`."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [Document(**json.loads(line)) for line in (lines[:limit] if limit else lines)]


def cut(ids: Sequence[int], context: int, stride: int) -> Iterator[Window]:
    """Windows of at most `context` tokens that score each token except the first exactly once.

    The first window scores all its tokens; each later one scores `stride` tokens after `context - stride` of context.
    """
    done = 1  # the first token follows none, so it has no probability
    while done < len(ids):
        last = min(len(ids), context if done == 1 else done + stride)
        begin = max(0, last - context)
        yield Window(tuple(ids[begin:last]), done - begin)
        done = last
