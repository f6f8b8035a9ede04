"""The names that a pattern of `patternProperties` matches, where they are few.

llguidance lets a text repeat a name that a pattern matches, and does not see that a pattern matches only names that
`properties` has, which leaves a text without continuation. Few names become `properties`: each is written once.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_MOST = 32  # names
_LONGEST = 256  # characters of a name
_BEGIN, _END = "\ue000", "\ue001"  # `^` and `$` among the characters of a name
_HEX = "[0-9a-fA-F]"
_TOKEN = re.compile(
    rf"\\u(?P<u>{_HEX}{{4}})|\\x(?P<x>{_HEX}{{2}})|\\(?P<escape>.)|(?P<open>\((?:\?:)?)"
    r"|\{(?P<least>\d{1,4})(?P<most>,\d{0,4})?\}|(?P<char>.)",
    re.DOTALL,
)


class _ManyError(Exception):
    """A pattern that matches many names, or that this module does not read."""


def names_of(pattern: str) -> list[str] | None:
    """All names that the pattern matches, in its order; None if they are many."""
    reader = _Reader(pattern)
    try:
        texts = reader.alternatives()
    except _ManyError:
        return None
    possible = [text for text in texts if _BEGIN not in text.lstrip(_BEGIN) and _END not in text.rstrip(_END)]
    if reader.token is not None or not all(text[:1] == _BEGIN and text[-1:] == _END for text in possible):
        return None  # an unpaired bracket, or any characters may stand before or after the match
    return list(dict.fromkeys(text.strip(_BEGIN + _END) for text in possible))


class _Reader:
    """Reads a pattern to the texts that it matches, by recursive descent; raises :class:`_ManyError`."""

    def __init__(self, pattern: str) -> None:
        self._tokens = _TOKEN.finditer(pattern)
        self.token = next(self._tokens, None)

    def alternatives(self) -> list[str]:
        texts = self._sequence()
        while self._takes("|"):
            texts = _few([*texts, *self._sequence()])
        return texts

    def _sequence(self) -> list[str]:
        texts = [""]
        while self.token is not None and self.token[0] not in ("|", ")"):
            again = self._repeated(self._atom())
            texts = _few(text + more for text in texts for more in again)
        return texts

    def _repeated(self, texts: list[str]) -> list[str]:
        """The texts as often as the quantifier behind them says."""
        if self.token is not None and (self.token["char"] or "") in ("*", "+"):
            raise _ManyError
        if self._takes("?"):
            self._takes("?")
            return _few(["", *texts])
        if self.token is None or self.token["least"] is None:
            return texts
        least, most = int(self.token["least"]), self.token["most"]
        if most == ",":
            raise _ManyError
        self._advance()
        self._takes("?")
        repeated, names = [""], [""] if least == 0 else []
        for count in range(1, (least if most is None else int(most[1:])) + 1):
            repeated = _few(text + more for text in repeated for more in texts)
            if count >= least:
                names = _few([*names, *repeated])
        return names

    def _atom(self) -> list[str]:
        token = self._advance()
        if token["open"]:
            texts = self.alternatives()
            if not self._takes(")"):
                raise _ManyError
            return texts
        if token["char"] in ("^", "$"):
            return [_BEGIN if token["char"] == "^" else _END]
        if token["char"] == "[":
            return self._class()
        if token["char"] in (".", "*", "+", "?") or token["least"]:
            raise _ManyError
        return _characters(token)

    def _class(self) -> list[str]:
        """The characters of `[...]`."""
        if self._takes("^"):
            raise _ManyError
        characters: list[str] = []
        while not self._takes("]"):
            first = _characters(self._advance())
            if self._takes("-"):
                if self.token is None or len(first) > 1:
                    raise _ManyError
                if self.token["char"] == "]":
                    first.append("-")
                else:
                    codes = range(ord(first[0]), ord(_characters(self._advance())[0]) + 1)
                    first = [chr(code) for code in codes[: _MOST + 1]]
            characters = _few([*characters, *first])
        return characters

    def _advance(self) -> re.Match[str]:
        token = self.token
        if token is None:
            raise _ManyError
        self.token = next(self._tokens, None)
        return token

    def _takes(self, char: str) -> bool:
        """Whether the next token is the character, which is then read."""
        if self.token is None or self.token["char"] != char:
            return False
        self._advance()
        return True


def _characters(token: re.Match[str]) -> list[str]:
    """The characters that a token outside all brackets stands for."""
    if code := token["u"] or token["x"]:
        characters = [chr(int(code, 16))]
    elif token["escape"] == "d":
        characters = list("0123456789")
    elif token["escape"] is not None and token["escape"].isalnum():
        raise _ManyError
    else:
        characters = [token["escape"] or token[0]]
    if len(characters[0]) > 1 or characters[0] in (_BEGIN, _END):
        raise _ManyError
    return characters


def _few(texts: Iterable[str]) -> list[str]:
    """The distinct texts; raises :class:`_ManyError` when they are many."""
    distinct: dict[str, None] = {}
    for text in texts:
        distinct[text] = None
        if len(distinct) > _MOST or len(text) > _LONGEST:
            raise _ManyError
    return list(distinct)
