"""FunctionGemma, Gemma 4: `call:get_weather{city:<escape>Oslo<escape>,days:[1,2]}`. A call is passed on as a whole."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import TypeVar

from services.gateway.tools.calls import MalformedCallError, Parsed
from services.gateway.tools.markup import Schemas, kind_of, read_value

T = TypeVar("T")
_HEAD = re.compile(r"\s*call:(?P<name>[^\s{}]+)\s*")


class BracedCall:
    """Reads one call."""

    def __init__(self, quote: str, schemas: Schemas) -> None:
        """`quote`: the mark on both sides of a text, in which models also write numbers that a schema asks for."""
        self.begun = False
        self.complete = False
        self._quote = quote
        self._schemas = schemas
        self._quoted = False
        self._text = ""
        self._depth = 0

    def feed(self, char: str, parsed: Parsed) -> None:
        """Read a character. Raises MalformedCallError."""
        self._text += char
        if self._text.endswith(self._quote):
            self._quoted = not self._quoted
        if self._quoted:
            return
        self._depth += (char in "{[") - (char in "}]")
        if char in "}]" and self._depth <= 0:
            self._end(parsed)

    def _end(self, parsed: Parsed) -> None:
        match = _HEAD.match(self._text)
        if match is None:
            raise MalformedCallError("a call has no name")
        tokens = _tokens(self._text[match.end() :], self._quote)
        value = _value(tokens)
        if tokens or not isinstance(value, dict):
            raise MalformedCallError("the arguments are no object")
        self.begun = self.complete = True
        properties = self._schemas.get(match["name"], {}).get("properties") or {}
        arguments = {key: _by_schema(argument, properties.get(key)) for key, argument in value.items()}
        parsed.begin(match["name"])
        parsed.arguments(json.dumps(arguments, ensure_ascii=False))


def _by_schema(value: object, schema: object) -> object:
    """A text as the number, boolean, array or object that the schema of its parameter asks for."""
    return read_value(value) if isinstance(value, str) and kind_of(schema) == "other" else value


def _tokens(text: str, quote: str) -> list[tuple[str, str]]:
    """Kind and text of each token, the last one first."""
    quote = re.escape(quote)
    token = re.compile(
        rf"\s*(?:{quote}(?P<text>.*?){quote}|(?P<mark>[{{}}\[\],:])|(?P<word>[^\s{{}}\[\],:<]+))", re.DOTALL
    )
    tokens, at = [], 0
    while text[at:].strip():
        match = token.match(text, at)
        if match is None or match.lastgroup is None:
            raise MalformedCallError(f"unreadable arguments: {text[at : at + 20]!r}")
        tokens.append((match.lastgroup, match[match.lastgroup]))
        at = match.end()
    return tokens[::-1]


def _value(tokens: list[tuple[str, str]]) -> object:
    kind, text = tokens.pop() if tokens else ("", "")
    if kind == "text":
        return text
    if kind == "word":
        try:
            return json.loads(text)
        except ValueError:
            return text
    if text == "[":
        return _many(tokens, "]", lambda: _value(tokens))
    if text == "{":
        return dict(_many(tokens, "}", lambda: _pair(tokens)))
    raise MalformedCallError(f"a value begins with {text!r}")


def _pair(tokens: list[tuple[str, str]]) -> tuple[str, object]:
    key = tokens.pop()[1] if tokens else ""
    if not tokens or tokens.pop() != ("mark", ":"):
        raise MalformedCallError(f"no value for {key!r}")
    return key, _value(tokens)


def _many(tokens: list[tuple[str, str]], end: str, read: Callable[[], T]) -> list[T]:
    values: list[T] = []
    while tokens and tokens[-1] != ("mark", end):
        values.append(read())
        if tokens and tokens[-1] == ("mark", ","):
            tokens.pop()
    if not tokens:
        raise MalformedCallError(f"no {end!r}")
    tokens.pop()
    return values
