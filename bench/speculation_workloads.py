"""Requests of bench.speculation: edits, quotes and JSON of real texts, and open questions.

The texts are from the Python standard library. A model with a chat template is asked by chat; a base model continues a
text. An edit is small and its answer is begun, because models of this size get lost in a file otherwise.
"""

from __future__ import annotations

import ast
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

CONCURRENCIES = (1, 4, 16)
NAMES = ("edit", "edit, sampled", "edit, prediction", "quote", "JSON", "prose", "chat")
_LIBRARY = Path(sysconfig.get_path("stdlib"))
_FILE_LINES = 100
_FILE_CHARS = range(2_000, 4_201)
_PASSAGE_CHARS = range(600, 1_401)
_GRAM = 8  # words
_FENCE = "```"
_COMMENT = "# Reviewed."
_TASK = f"Add the comment `{_COMMENT}` above the first line of this file. Answer with the whole file."
_GIVEN_LINES = 2  # lines of the file at the beginning of the answer
_STRING = {"type": "string", "maxLength": 300}
_SCHEMA = {
    "type": "object",
    "properties": {
        "first_sentence": _STRING,
        "last_sentence": _STRING,
        "terms": {"type": "array", "items": {"type": "string", "maxLength": 30}, "minItems": 5, "maxItems": 5},
    },
    "required": ["first_sentence", "last_sentence", "terms"],
    "additionalProperties": False,
}
_TOPICS = (
    "a lighthouse", "tides", "bread", "bees", "printing", "chess", "volcanoes", "a lost key", "bridges", "rain",
    "an old clock", "whales", "maps", "a night train", "glass", "mountains", "a library", "salt", "kites", "the moon",
    "a river", "an orchard",
)  # fmt: skip


@dataclass(frozen=True)
class Ask:
    """One request: its API, its body without the model, and the text that its answer may repeat."""

    path: str
    body: dict[str, Any]
    source: str = ""

    def with_fields(self, **fields: Any) -> Ask:
        """The same request with more fields in its body."""
        return replace(self, body=self.body | fields)

    def capped(self, max_tokens: int) -> Ask:
        """The same request with a shorter answer."""
        return self.with_fields(max_tokens=min(self.body["max_tokens"], max_tokens))


@dataclass(frozen=True)
class Workload:
    """Requests of one kind. A text is in one request only, because drafts may come from a tenant's earlier answers."""

    name: str
    asks: Sequence[Ask]
    concurrencies: Sequence[int] = CONCURRENCIES

    def cells(self) -> Iterator[tuple[int, Sequence[Ask]]]:
        """Yield each number of concurrent requests with its requests."""
        rest = iter(self.asks)
        for concurrency in self.concurrencies:
            yield concurrency, tuple(islice(rest, n_requests([concurrency])))


def n_requests(concurrencies: Sequence[int]) -> int:
    """The number of requests of a workload: two, one after the other, where one runs alone."""
    return sum(max(2, concurrency) for concurrency in concurrencies)


_EDITS = (CONCURRENCIES, (1, 4), (1,))  # plain, sampled, with prediction
N_EDITS = sum(map(n_requests, _EDITS))


def workloads(edits: Sequence[Ask], *, chat: bool) -> list[Workload]:
    """The workloads of `NAMES` that have requests. `edits`: `N_EDITS` requests, or none.

    A base model has no `prediction`, which is a field of chats.
    """
    rest, passages = iter(edits), _passages()
    plain, sampled, known = (tuple(islice(rest, n_requests(each))) for each in _EDITS)
    drawn = [ask.with_fields(temperature=0.5, seed=seed) for seed, ask in enumerate(sampled)]
    predicted = [ask.with_fields(prediction={"type": "content", "content": ask.source}) for ask in known if chat]
    n_passages = n_requests(CONCURRENCIES)
    measured = (
        Workload("edit", plain),
        Workload("edit, sampled", drawn, _EDITS[1]),
        Workload("edit, prediction", predicted, _EDITS[2]),
        Workload("quote", [_quote(passage, chat=chat) for passage in islice(passages, n_passages)]),
        Workload("JSON", [_extract(passage, chat=chat) for passage in islice(passages, n_passages)]),
        Workload("prose", [_question(f"Write a short story about {topic}.", 256, chat=chat) for topic in _TOPICS]),
        Workload("chat", [_question(f"What should I know about {topic}?", 256, chat=chat) for topic in _TOPICS]),
    )
    return [load for load in measured if load.asks]


def edits(*, chat: bool) -> Iterator[Ask]:
    """Ask for 100 lines of each long module with a comment above them. The first lines of the answer are given."""
    for code in _files():
        given = "".join(code.splitlines(keepends=True)[:_GIVEN_LINES])
        # No newline at the end: a token of a line break often holds the next line's indentation.
        begun = f"{_FENCE}python\n{_COMMENT}\n{given}".rstrip()
        text = f"{_TASK}\n\n{_FENCE}python\n{code}{_FENCE}"
        options = {"max_tokens": len(code) // 3, "stop": [_FENCE], "temperature": 0}
        if chat:
            turns = [{"role": "user", "content": text}, {"role": "assistant", "content": begun}]
            fields = {"messages": turns, "add_generation_prompt": False, "continue_final_message": True}
            yield Ask("chat/completions", fields | options, code)
        else:
            yield Ask(
                "completions", {"prompt": f"{text}\n\nThe same file with the comment:\n\n{begun}"} | options, code
            )


def warm_up(*, chat: bool) -> Ask:
    """A request of no workload."""
    return _question("Count to ten.", 32, chat=chat)


def _quote(passage: str, *, chat: bool) -> Ask:
    return _question(f"Quote this passage word for word:\n\n{passage}", 400, passage, chat=chat)


def _extract(passage: str, *, chat: bool) -> Ask:
    text = f"Extract the first sentence, the last sentence and five terms of this passage as JSON:\n\n{passage}"
    return _question(text, 400, passage, chat=chat).with_fields(guided_json=_SCHEMA)


def _question(text: str, max_tokens: int, source: str = "", *, chat: bool) -> Ask:
    options = {"max_tokens": max_tokens, "temperature": 0}
    if chat:
        return Ask("chat/completions", options | {"messages": [{"role": "user", "content": text}]}, source)
    return Ask("completions", options | {"prompt": f"{text}\n\nAnswer:\n\n"}, source)


def repeated_share(source: str, answer: str) -> float:
    """The share of the answer's 8-grams of words that stand in the source; 0.0 for an answer without any."""
    known, grams = set(_grams(source)), list(_grams(answer))
    return sum(gram in known for gram in grams) / len(grams) if grams else 0.0


def _grams(text: str) -> Iterator[tuple[str, ...]]:
    words = text.split()
    return (tuple(words[place : place + _GRAM]) for place in range(len(words) - _GRAM + 1))


def _modules() -> Iterator[str]:
    """Yield the source of each public module of the standard library, in the order of names."""
    for name in sorted(sys.stdlib_module_names):
        for file in (_LIBRARY / f"{name}.py", _LIBRARY / name / "__init__.py"):
            if not name.startswith("_") and file.is_file():
                yield file.read_text("utf-8")


def _files() -> Iterator[str]:
    """Yield 100 lines of each module that has them after the beginning of its first class or function."""
    for text in _modules():
        lines = text.splitlines(keepends=True)
        for node in ast.parse(text).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                first = node.lineno - 1
                code = "".join(lines[first : first + _FILE_LINES])
                if first + _FILE_LINES <= len(lines) and len(code) in _FILE_CHARS:
                    yield code
                break


def _passages() -> Iterator[str]:
    """Yield a docstring of each module that has one of a passage's length."""
    for text in _modules():
        tree = ast.parse(text)
        nodes = [tree, *(node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef))]
        docstrings = (ast.get_docstring(node) or "" for node in nodes)
        yield from islice((each for each in docstrings if len(each) in _PASSAGE_CHARS), 1)
