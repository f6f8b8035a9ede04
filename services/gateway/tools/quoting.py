"""Quotes that a model has written into a text without a backslash: `[bash(command='sed -n '3,5p' a.py')]`."""

from __future__ import annotations

import re
from collections.abc import Set
from dataclasses import dataclass

_PAIRS = {"(": ")", "[": "]", "{": "}"}
_KEYWORD = re.compile(r"\s*(?:(?P<key>[^\W\d]\w*)\s*=|\))")
_CALL = re.compile(r"\s*(?:[^\W\d][\w.]*\s*\(|\])")
_ITEM = re.compile(r"\s*(?:['\"\[{(\d\]})-]|(?:True|true|False|false|None|null)\b)")


def with_escapes(calls: str, keys: Set[str]) -> str | None:
    """A list of calls in Python with backslashes before the quotes within its texts; None if it remains unclear.

    `keys`: names of parameters; empty: any may follow a text. A quote ends its text only where a value may end: before
    a bracket that closes an open one, or before a comma and another parameter, call or item.
    """
    return _Quoting(calls, keys).read()


@dataclass(slots=True)
class _Quoting:
    text: str
    keys: Set[str]
    open: str = ""  # brackets

    def read(self) -> str | None:
        """See :func:`with_escapes`."""
        written, at = "", 0
        while at < len(self.text):
            char, end = self.text[at], at
            if char in "'\"":
                closing = self._end(at)
                if closing is None:
                    return None
                char, end = _escaped(self.text[at + 1 : closing], char), closing
            elif char in _PAIRS:
                self.open += char
            elif char in ")]}":
                if not self.open or _PAIRS[self.open[-1]] != char:
                    return None
                self.open = self.open[:-1]
            written += char
            at = end + 1
        return None if self.open else written

    def _end(self, start: int) -> int | None:
        """The place of the quote that ends the text of the one at `start`."""
        at = start + 1
        while at < len(self.text):
            if self.text[at] == "\\":
                at += 1
            elif self.text[at] == self.text[start] and self._may_end(at + 1):
                return at
            at += 1
        return None

    def _may_end(self, at: int) -> bool:
        """Whether the text before `at` may be a whole value."""
        brackets = self.open
        while (at := _blanks_end(self.text, at)) < len(self.text):
            char = self.text[at]
            if brackets and char == _PAIRS[brackets[-1]]:
                brackets = brackets[:-1]
            elif char == ":":
                return brackets == self.open and brackets.endswith("{")
            else:
                return char == "," and self._goes_on(at + 1, brackets)
            at += 1
        return not brackets

    def _goes_on(self, at: int, brackets: str) -> bool:
        """Whether another parameter, call or item stands behind a comma, between these brackets."""
        if brackets.endswith("("):
            match = _KEYWORD.match(self.text, at)
            return match is not None and (match["key"] is None or not self.keys or match["key"] in self.keys)
        return bool(brackets) and (_CALL if brackets == "[" else _ITEM).match(self.text, at) is not None


def _blanks_end(text: str, at: int) -> int:
    while at < len(text) and text[at].isspace():
        at += 1
    return at


def _escaped(content: str, quote: str) -> str:
    """A literal whose quotes have backslashes; those that had one keep it."""
    pieces = re.split(r"(\\.)", content, flags=re.DOTALL)
    pieces[::2] = (piece.replace(quote, f"\\{quote}") for piece in pieces[::2])
    return f"{quote}{''.join(pieces)}{quote}"
