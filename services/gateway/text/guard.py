"""Finds clients' text in a rendered conversation, so that it never becomes control tokens.

A template's output mixes its own control tokens with clients' texts. Before rendering, each control token that a client
spelled is put between two marks that no client can know. After rendering, the marks show which parts of the text are
ordinary characters.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from typing import Any

from msgspec import Struct
from tokenizers import Tokenizer


class PromptPart(Struct, frozen=True):
    """A part of the prompt; a `literal` part has no control tokens."""

    text: str
    literal: bool


class ControlTokens:
    """The spellings of one tokenizer's control tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        added = tokenizer.get_added_tokens_decoder().values()
        spelled = sorted((token.content for token in added if token.special and token.content), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, spelled))) if spelled else None

    def in_text(self, text: str) -> bool:
        """Whether a text spells a control token."""
        return self._pattern is not None and self._pattern.search(text) is not None

    def wrap(self, value: Any, marks: Marks) -> Any:
        """A JSON value with each control token in its texts put between marks."""
        if isinstance(value, str):
            return value if self._pattern is None else self._pattern.sub(marks.around, value)
        if isinstance(value, dict):
            return {key: self.wrap(inner, marks) for key, inner in value.items()}
        if isinstance(value, list):
            return [self.wrap(inner, marks) for inner in value]
        return value

    def parts(self, text: str, marks: Marks) -> list[PromptPart]:
        """Cut a rendered text into parts, without the marks.

        A literal part extends from a marked spelling to the template's control tokens on both sides, so that its
        characters are tokenized together with the adjacent text.
        """
        pieces = marks.split(text)
        if len(pieces) == 1:
            return [PromptPart(text, literal=False)]
        parts: list[PromptPart] = []
        literal = ""
        for position, piece in enumerate(pieces):
            first, last = self._ends(piece) if position % 2 == 0 else (None, None)
            if first is None:
                literal += piece
                continue
            start, stop = first if position else 0, last if position < len(pieces) - 1 else len(piece)
            parts += [PromptPart(literal + piece[:start], literal=True), PromptPart(piece[start:stop], literal=False)]
            literal = piece[stop:]
        parts.append(PromptPart(literal, literal=True))
        return [part for part in parts if part.text]

    def _ends(self, text: str) -> tuple[int | None, int | None]:
        """The start of the first control token in a text, and the end of the last one."""
        spellings = list(self._pattern.finditer(text)) if self._pattern is not None else []
        return (spellings[0].start(), spellings[-1].end()) if spellings else (None, None)


class Marks:
    """The marks of one rendering: digits between private-use characters, which no template changes."""

    def __init__(self) -> None:
        number = secrets.randbits(64)
        self._open, self._close = f"\ue000{number}\ue001", f"\ue001{number}\ue000"
        self.end = f"\ue002{number}\ue003"  # follows the message that the model continues
        self.image = f"\ue004{number}\ue005"  # stands for an image

    def around(self, match: re.Match[str]) -> str:
        """Put a spelling between marks."""
        return self._open + match[0] + self._close

    def split(self, text: str) -> Sequence[str]:
        """Split a text into alternating text and spellings."""
        return text.replace(self._close, self._open).split(self._open)

    def cut(self, text: str) -> str | None:
        """The text up to the end of the message that the model continues; None when the template dropped the mark."""
        at = text.rfind(self.end)
        return None if at < 0 else text[:at]
