"""Client text in a rendered conversation: where it stands, so that what it spells is never taken for control tokens.

A template mixes its own control tokens with what clients wrote, in one text. Before it is rendered, every control
token that a client spelled is put between two marks that no client can know; afterwards the marks say which parts of
the text are to be read as ordinary characters.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer


@dataclass(frozen=True, slots=True)
class PromptPart:
    """A run of the prompt; control tokens are only looked for in it when it is not `literal`."""

    text: str
    literal: bool


class ControlTokens:
    """The spellings of one tokenizer's control tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        added = tokenizer.get_added_tokens_decoder().values()
        spelled = sorted((token.content for token in added if token.special and token.content), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, spelled))) if spelled else None

    def in_text(self, text: str) -> bool:
        """Whether a text spells any."""
        return self._pattern is not None and self._pattern.search(text) is not None

    def wrap(self, value: Any, marks: Marks) -> Any:
        """A JSON value with every spelling in its texts put between marks."""
        if isinstance(value, str):
            return value if self._pattern is None else self._pattern.sub(marks.around, value)
        if isinstance(value, dict):
            return {key: self.wrap(inner, marks) for key, inner in value.items()}
        if isinstance(value, list):
            return [self.wrap(inner, marks) for inner in value]
        return value

    def parts(self, text: str, marks: Marks) -> list[PromptPart]:
        """Cut a rendered text into parts, without the marks.

        Around each marked spelling the literal part reaches to the next control token of the template, so that its
        characters are tokenized together with the text beside them.
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
        """Where the first control token of a text begins and the last one ends."""
        found = list(self._pattern.finditer(text)) if self._pattern is not None else []
        return (found[0].start(), found[-1].end()) if found else (None, None)


class Marks:
    """Marks of one rendering. Digits between private-use characters: no template changes them."""

    def __init__(self) -> None:
        number = secrets.randbits(64)
        self._open, self._close = f"\ue000{number}\ue001", f"\ue001{number}\ue000"
        self.end = f"\ue002{number}\ue003"  # behind the message that is to be continued

    def around(self, found: re.Match[str]) -> str:
        """A spelling between marks."""
        return self._open + found[0] + self._close

    def split(self, text: str) -> Sequence[str]:
        """Text and spellings in turn."""
        return text.replace(self._close, self._open).split(self._open)

    def cut(self, text: str) -> str | None:
        """The text up to the end of the message that is to be continued; None when the template dropped it."""
        at = text.rfind(self.end)
        return None if at < 0 else text[:at]
