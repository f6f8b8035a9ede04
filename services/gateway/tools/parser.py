"""The common part of all parsers: separates content from calls."""

from __future__ import annotations

import string
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from services.gateway.tools.calls import JsonCalls, MalformedCallError, Parsed
from services.gateway.tools.markup import Schemas


class Body(Protocol):
    """Reads the text between the marks of a call."""

    begun: bool  # a name was found, so the text is a call
    complete: bool

    def feed(self, char: str, parsed: Parsed) -> None:
        """Read a character. Raises MalformedCallError."""


class CallReader(Protocol):
    """Finds calls in a text that arrives in pieces."""

    def push(self, text: str) -> Parsed:
        """Read a piece."""

    def finish(self) -> Parsed:
        """End the text; returns what was held back."""


@dataclass(frozen=True, slots=True)
class OpenCall:
    """The mark of a call that begins, and the tools that it may name."""

    mark: str  # that begins the call; empty: it has none
    names: frozenset[str]  # tools that may be called
    schemas: Schemas  # schemas of their arguments

    @property
    def own_names(self) -> frozenset[str] | None:
        """The names that a call without a mark must have, since it may be content."""
        return None if self.mark else self.names

    @property
    def keys(self) -> frozenset[str]:
        """The names of all parameters."""
        return frozenset(key for schema in self.schemas.values() for key in schema.get("properties") or ())


@dataclass(frozen=True, slots=True)
class CallFormat:
    """A way in which models write calls."""

    body: Callable[[OpenCall], Body] = lambda call: JsonCalls(call.own_names)
    begins: tuple[str, ...] = ()  # marks before a call; models reason about the first one only if `quoted`
    named: tuple[str, ...] = ()  # further marks before a call; `{}` stands for a tool's name
    ends: tuple[str, ...] = ()  # marks after a call, which models may omit
    bare: str = ""  # characters that begin a call without a mark, at the text's beginning or after a call
    again: str = ""  # characters that begin a further call directly after a call
    special: bool = False  # the marks are control tokens
    enforced: bool = False  # a grammar enforces the calls: a text that begins as one is no content
    between: str = ""  # characters, in addition to blanks, that may separate calls
    quoted: bool = False  # models quote the marks in their reasoning

    def marks_of(self, names: frozenset[str]) -> tuple[str, ...]:
        """The further marks before a call of one of these tools."""
        return tuple(mark.replace("{}", name) for mark in self.named for name in sorted(names))

    def ends_reasoning(self, names: frozenset[str]) -> tuple[str, ...]:
        """Marks that end the reasoning, since a call begins with them wherever they stand."""
        if not self.special:
            return ()
        return (*(() if self.quoted else self.begins[:1]), *self.marks_of(names))


class ToolParser:
    """Splits a text into content and calls; the text may come in any pieces.

    Text that may begin a mark is held back. Blanks before a call are dropped. A text that looks like a call but fails
    before its name is content, unless a grammar enforces calls: then it was cut off.
    """

    def __init__(self, form: CallFormat, names: frozenset[str], schemas: Schemas) -> None:
        self._form = form
        self._begins = (*form.begins, *form.marks_of(names))
        self._names = names
        self._schemas = schemas
        self._n_calls = 0
        self._held = ""
        self._body: Body | None = None
        self._raw = ""  # the body's text, while it may still be content
        self._open = True  # a call without a mark may begin
        self._after = False  # after a call: skip its end mark and separators

    def push(self, text: str) -> Parsed:
        """Read a piece."""
        parsed = Parsed(self._n_calls)
        pending = self._held + text
        self._held = ""
        while pending:
            rest = self._read_body(pending, parsed) if self._body is not None else self._read_text(pending, parsed)
            if rest is None:
                self._held = pending
                break
            pending = rest
        self._n_calls = parsed.n_calls
        return parsed

    def finish(self) -> Parsed:
        """End the text; returns what was held back."""
        parsed = Parsed(self._n_calls)
        if self._body is not None and not self._body.begun:
            parsed.content = "" if self._form.enforced else self._raw
        elif self._body is None and not self._after:
            parsed.content = self._held
        self._body, self._held = None, ""
        return parsed

    def _read_body(self, text: str, parsed: Parsed) -> str:
        """Feed the body until it is complete; returns the rest of the text."""
        assert self._body is not None
        for at, char in enumerate(text):
            if not self._body.begun:
                self._raw += char
            try:
                self._body.feed(char, parsed)
            except MalformedCallError:
                if not self._body.begun:
                    parsed.content += self._raw
                self._body, self._open = None, False
                return text[at + 1 :]
            if self._body.complete:
                self._body, self._after, self._open = None, True, True
                return text[at + 1 :]
        return ""

    def _read_text(self, text: str, parsed: Parsed) -> str | None:
        """Pass on content up to the next call; returns the rest of the text, or None when more text is needed."""
        if self._after and (rest := self._skip_after(text)) != text:
            return rest or None
        if self._open and (stripped := text.lstrip()) == "":
            return None  # the text after the blanks decides whether they are content
        if self._open and stripped[0] in self._form.bare:
            self._begin(text[: len(text) - len(stripped)], "")
            return stripped
        if self._after and stripped[0] in self._form.again:
            self._begin(text[: len(text) - len(stripped)], stripped[0])
            return stripped
        marks = [(text.find(mark), -len(mark), mark) for mark in self._begins if mark in text]
        if marks:
            start, _, mark = min(marks)
            self._pass_on(text[:start].rstrip(), parsed)
            self._begin(text[len(text[:start].rstrip()) : start + len(mark)], mark)
            return text[start + len(mark) :]
        n_held = self._may_begin(text)
        if n_held == len(text):
            return None
        self._pass_on(text[: len(text) - n_held], parsed)
        return text[len(text) - n_held :]

    def _pass_on(self, text: str, parsed: Parsed) -> None:
        if text:
            parsed.content += text
            self._open = self._after = False

    def _begin(self, raw: str, mark: str) -> None:
        self._raw, self._after = raw, False
        self._body = self._form.body(OpenCall(mark, self._names, self._schemas))

    def _skip_after(self, text: str) -> str:
        """Skip an end mark and separators; returns the rest of the text, or None when more text is needed."""
        stripped = text.lstrip(string.whitespace + self._form.between)
        for mark in self._form.ends:
            if stripped.startswith(mark):
                return stripped[len(mark) :]
        return "" if any(mark.startswith(stripped) for mark in self._form.ends) else stripped

    def _may_begin(self, text: str) -> int:
        """The length of a suffix that may begin a mark, including blanks before it."""
        longest = 0
        for mark in (*self._begins, *(self._form.ends if self._after else ())):
            for length in range(min(len(mark) - 1, len(text)), longest, -1):
                if text.endswith(mark[:length]):
                    longest = length
                    break
        head = text[: len(text) - longest]
        return longest + len(head) - len(head.rstrip())
