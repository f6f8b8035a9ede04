"""Reads reasoning between a pair of tags at the beginning of an answer."""

from __future__ import annotations

from functools import lru_cache

# A model uses the first pair whose opening tag its chat template contains.
TAGS = (
    ("<think>", "</think>"),  # DeepSeek R1, Qwen 3 and many others
    ("[THINK]", "[/THINK]"),  # Magistral
    ("<seed:think>", "</seed:think>"),
    ("<reasoning>", "</reasoning>"),
)


@lru_cache
def tags_of(template: str) -> tuple[str, str] | None:
    """The reasoning tags of a model, by its chat template; None if it has none."""
    return next((tags for tags in TAGS if tags[0] in template), None)


class ReasoningParser:
    """Splits a text into reasoning and answer; the text may come in any pieces."""

    def __init__(self, tags: tuple[str, str], *, inside: bool) -> None:
        """`inside`: the prompt ends with the opening tag."""
        self._begin, self._end = tags
        self._inside = inside
        self.begun = inside  # false while the text may still begin with the tag
        self.done = False  # no more reasoning follows
        self._held = ""

    def push(self, text: str) -> tuple[str, str]:
        """The reasoning and the answer in a piece."""
        if self.done:
            return "", self._answer(text)
        text, self._held = self._held + text, ""
        if not self.begun:
            stripped = text.lstrip()
            if self._begin.startswith(stripped):
                self._held = text
                if stripped != self._begin:
                    return "", ""
            if not stripped.startswith(self._begin):
                self.done = self._answering = True
                return "", text
            self.begun = self._inside = True
            text, self._held = stripped[len(self._begin) :], ""
        return self._reason(text)

    def _reason(self, text: str) -> tuple[str, str]:
        before, end, after = text.partition(self._end)
        if end:
            self.done = True
            return before, self._answer(after)
        n_held = next(
            (n for n in range(min(len(self._end) - 1, len(text)), 0, -1) if self._end.startswith(text[-n:])), 0
        )
        self._held = text[len(text) - n_held :]
        return text[: len(text) - n_held], ""

    _answering = False  # blanks between reasoning and answer are dropped

    def _answer(self, text: str) -> str:
        if not self._answering:
            text = text.lstrip()
            self._answering = bool(text)
        return text

    def finish(self) -> tuple[str, str]:
        """End the text; returns what was held back."""
        held, self._held = self._held, ""
        return (held, "") if self._inside and not self.done else ("", held)
