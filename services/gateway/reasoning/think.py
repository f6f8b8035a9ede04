"""Reads reasoning between a pair of marks at the beginning of an answer."""

from __future__ import annotations

from collections.abc import Sequence

from services.gateway.reasoning.formats import ReasoningFormat


def held_back(text: str, marks: Sequence[str]) -> int:
    """The length of the longest end of a text that may begin one of the marks."""
    return max(
        (n for mark in marks for n in range(min(len(mark) - 1, len(text)), 0, -1) if mark.startswith(text[-n:])),
        default=0,
    )


class _Dropped:
    """Takes marks out of a text, which may come in any pieces."""

    def __init__(self, marks: Sequence[str]) -> None:
        self._marks = sorted(marks, key=len, reverse=True)
        self._held = ""

    def push(self, text: str) -> str:
        """The text without the marks."""
        if not self._marks:
            return text
        text, out = self._held + text, ""
        while marks := [(text.find(mark), -len(mark)) for mark in self._marks if mark in text]:
            start, length = min(marks)
            out, text = out + text[:start], text[start - length :]
        n_held = held_back(text, self._marks)
        self._held = text[len(text) - n_held :]
        return out + text[: len(text) - n_held]

    def finish(self) -> str:
        """The text that was held back."""
        held, self._held = self._held, ""
        return held


class ReasoningParser:
    """Splits a text into reasoning and answer; the text may come in any pieces."""

    def __init__(self, form: ReasoningFormat, *, inside: bool, calls: Sequence[str] = ()) -> None:
        """`inside`: the prompt ends with the opening mark. `calls`: marks of calls, which end the reasoning as well."""
        self._form = form
        self._ends = (form.end, *form.ends)
        self._calls = tuple(calls)
        self._inside = inside
        self.begun = inside  # false while the text may still begin with the mark
        self.done = False  # no more reasoning follows
        self._held = ""
        self._marks = _Dropped(form.answer)

    def push(self, text: str) -> tuple[str, str]:
        """The reasoning and the answer in a piece."""
        if self.done:
            return "", self._answer(text)
        text, self._held = self._held + text, ""
        if not self.begun:
            stripped = text.lstrip()
            opened = next((mark for mark in self._form.begins if stripped.startswith(mark)), None)
            if opened is None and any(mark.startswith(stripped) for mark in self._form.begins):
                self._held = text
                return "", ""
            if opened is None:
                self.done = self._answering = True
                return "", self._marks.push(text)
            self.begun = self._inside = True
            text = stripped[len(opened) :]
        return self._reason(text)

    def _reason(self, text: str) -> tuple[str, str]:
        marks = [(text.find(mark), mark) for mark in (*self._ends, *self._calls) if mark in text]
        if marks:
            self.done = True
            start, mark = min(marks)
            return text[:start], self._answer(text[start + len(mark) if mark in self._ends else start :])
        n_held = held_back(text, (*self._ends, *self._calls))
        self._held = text[len(text) - n_held :]
        return text[: len(text) - n_held], ""

    _answering = False  # blanks between reasoning and answer are dropped

    def _answer(self, text: str) -> str:
        text = self._marks.push(text)
        if not self._answering:
            text = text.lstrip()
            self._answering = bool(text)
        return text

    def finish(self) -> tuple[str, str]:
        """End the text; returns what was held back."""
        held, self._held = self._held, ""
        if self._inside and not self.done:
            return held, ""
        rest = self._marks.push(held) + self._marks.finish()
        return "", rest if self._answering else rest.lstrip()
