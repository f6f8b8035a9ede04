"""Chat samples made from the training documents, so that the model knows how a turn begins and ends.

Every choice is a hash of the entry's name: the same library gives the same samples.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from trainer.chat_basics import BASICS, IDENTITY, TASK_PHRASES
from trainer.corpus import CorpusText, Entry, Group, documented
from trainer.tokenizer import render_turn

Choice = TypeVar("Choice")

MAX_ANSWER = 700
MAX_SOURCE = 1_200
# Often enough to be learnt by heart in one run.
BASICS_REPEATS = 40
SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a helpful assistant who knows the Python standard library.",
    "Answer briefly.",
    "You are a Python programmer.",
)
DOC_QUESTIONS = {
    "module": (
        "What is the module `{name}` for?",
        "What does the {name} module do?",
        "What is {name} in Python?",
        "Describe the `{name}` module.",
    ),
    "class": (
        "What is the class `{name}`?",
        "What is {name}?",
        "Explain `{name}`.",
        "What is `{name}` used for?",
    ),
    "function": (
        "What does `{name}` do?",
        "What does {name} do?",
        "Explain `{name}`.",
        "How do I use `{name}`?",
        "Tell me about {name}.",
    ),
}
CODE_QUESTIONS = (
    "Write a function `{short}`: {summary}",
    "Write a Python function called {short}. {summary}",
    "Show me how `{name}` is written.",
    "Implement `{short}` in Python. {summary}",
)
TOPIC_QUESTIONS = ("Explain {name} in Python.", "What does the language reference say about {name}?")


@dataclass(frozen=True)
class QuestionAnswer:
    """One question and its answer."""

    question: str
    answer: str

    def render(self, key: str) -> str:
        """The conversation in the chat template's form; one in four opens with a system message."""
        system = ""
        if pick(range(4), key + "?system") == 0:
            system = render_turn("system", pick(SYSTEM_PROMPTS, key + "!system"))
        return system + render_turn("user", self.question) + render_turn("assistant", self.answer)


def pick(choices: Sequence[Choice], key: str) -> Choice:
    """One of `choices`, by a hash of `key`."""
    return choices[int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "big") % len(choices)]


def first_paragraphs(doc: str, limit: int = MAX_ANSWER) -> str:
    """Leading paragraphs of a docstring, up to `limit` characters; always at least a part of the first."""
    kept = ""
    for paragraph in doc.strip().split("\n\n"):
        if kept and len(kept) + len(paragraph) > limit:
            break
        kept = f"{kept}\n\n{paragraph}" if kept else paragraph
    return kept if len(kept) <= limit else kept[:limit].rsplit("\n", 1)[0].rstrip()


def summary_line(doc: str) -> str:
    """First sentence-like line of a docstring."""
    return doc.strip().split("\n\n")[0].replace("\n", " ").strip()


def turns_from_entry(entry: Entry) -> Iterator[QuestionAnswer]:
    """What an entry can teach: what it does and, for a short function, how it is written."""
    short = entry.name.rsplit(".", 1)[-1]
    if short.startswith("_") and not short.startswith("__"):
        return
    question = pick(DOC_QUESTIONS[entry.kind], entry.name)
    yield QuestionAnswer(question.format(name=entry.name), first_paragraphs(entry.doc))
    if entry.source and len(entry.source) <= MAX_SOURCE and '\n        """' not in entry.source[:40]:
        question = pick(CODE_QUESTIONS, entry.name + "#code")
        asked = question.format(short=short, name=entry.name, summary=summary_line(entry.doc)).strip()
        yield QuestionAnswer(asked, f"```python\n{dedented(entry.source)}\n```")


def dedented(source: str) -> str:
    """Source of a method moved to the left margin."""
    lines = source.rstrip().splitlines()
    margin = len(lines[0]) - len(lines[0].lstrip())
    return "\n".join(line[margin:] if not line[:margin].strip() else line for line in lines)


def turns_from_topic(document: CorpusText) -> Iterator[QuestionAnswer]:
    """A question about a topic of the language reference; its first lines are a title and a rule."""
    name = document.path.partition("#")[2]
    _, _, body = document.text.partition("\n\n")
    if body.strip():
        yield QuestionAnswer(pick(TOPIC_QUESTIONS, name).format(name=f"`{name}`"), first_paragraphs(body))


def basic_turns() -> Iterator[QuestionAnswer]:
    """Small tasks and questions about the model itself, each in every phrasing."""
    for question, answer in IDENTITY:
        yield QuestionAnswer(question, answer)
    for task, code in BASICS:
        for phrase in TASK_PHRASES:
            yield QuestionAnswer(phrase.format(task=task), f"```python\n{code.strip()}\n```")


def chat_documents(train: Iterable[CorpusText]) -> list[CorpusText]:
    """Chat samples from training documents only, in a fixed order."""
    samples: list[CorpusText] = []
    for document in train:
        turns: Iterable[QuestionAnswer] = ()
        if document.group is Group.LIBRARY:
            turns = (turn for entry in documented(document) for turn in turns_from_entry(entry))
        elif document.group is Group.DOCUMENTATION and "#docstrings" not in document.path:
            turns = turns_from_topic(document)
        samples.extend(_as_document(turn, f"{document.path}:{index}") for index, turn in enumerate(turns))
    for repeat in range(BASICS_REPEATS):
        samples.extend(_as_document(turn, f"basics:{repeat}:{index}") for index, turn in enumerate(basic_turns()))
    return samples


def _as_document(turn: QuestionAnswer, key: str) -> CorpusText:
    return CorpusText(f"chat/{key}", Group.CHAT, turn.render(key))
