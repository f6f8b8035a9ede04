"""Calls in markup: a name, then parameters each between its own marks, as text that is no JSON.

A text parameter is passed on as it arrives; another value when it is complete. A line break at a value's beginning and
one at its end belong to the marks where models write values on lines of their own.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from services.gateway.tools.calls import JsonCalls, MalformedCallError, Parsed

_LONGEST_NAME = 300  # characters
_NAME = re.compile(r"[^\s<>\"'{}]{1,256}")
_CDATA, _CDATA_END = "<![CDATA[", "]]>"
Schemas = Mapping[str, Mapping[str, Any]]  # schemas of arguments, by the tools' names


@dataclass(frozen=True, slots=True)
class Markup:
    """The marks of a format."""

    call: str  # before the name; empty: the name follows the mark of the call
    name_end: str  # empty: the name ends at the next mark or line
    parameter: str  # before a parameter's name
    key_end: str
    value_end: str
    call_end: str
    value: str = ""  # between the parameter's name and its value
    before: tuple[str, ...] = ()  # marks that may be before `call`
    typed: tuple[str, str] = ("", "")  # around the type of a value, which may be before `value`
    cdata: bool = False  # a value may be in a CDATA section
    lines: bool = False  # values stand on lines of their own
    whole: tuple[str, str] = ("", "")  # around one JSON object with all arguments, in place of parameters
    titled: str = ""  # a mark of `before`, behind which the name stands a first time
    separator: str = ""  # may be behind the name


class MarkupCall:
    """Reads one call."""

    def __init__(self, marks: Markup, schemas: Schemas, *, called: bool) -> None:
        """`called`: the mark before the name has been read."""
        self.begun = False
        self.complete = False
        self._marks = marks
        self._schemas = schemas
        self._properties: Mapping[str, Any] = {}
        self._read = self._read_name if called or not marks.call else self._read_mark
        self._text = ""
        self._n_parameters = 0
        self._value: _Value | None = None
        self._titled = False

    def feed(self, char: str, parsed: Parsed) -> None:
        """Read a character. Raises MalformedCallError."""
        self._text += char
        self._read(parsed)

    def _read_mark(self, parsed: Parsed) -> None:
        text = self._text.lstrip()
        if self._titled and len(text) < _LONGEST_NAME:
            text = text[text.find("<") :] if "<" in text else ""
        if text == self._marks.call:
            self._text, self._read = "", self._read_name
        elif text in self._marks.before:
            self._titled = text == self._marks.titled
            self._text = ""
        elif not any(mark.startswith(text) for mark in (self._marks.call, *self._marks.before)):
            raise MalformedCallError(f"a call begins with {text!r}")

    def _read_name(self, parsed: Parsed) -> None:
        end, text = self._marks.name_end, self._text
        if end:
            name, ended, rest = text.removesuffix(end), text.endswith(end), ""
        else:
            name, ended = text.rstrip("<\n"), bool(text.strip()) and text[-1] in "<\n"
            rest = text[-1]
        if not ended:
            if len(text) > _LONGEST_NAME:
                raise MalformedCallError("a call has no name")
            return
        name = name.partition('" ')[0]  # attributes follow
        if not _NAME.fullmatch(name.strip()):
            raise MalformedCallError(f"{name!r} is no name")
        self.begun, self._text, self._read = True, rest.strip(), self._read_between
        parsed.begin(name.strip())
        parsed.arguments("{")
        self._properties = self._schemas.get(name.strip(), {}).get("properties") or {}

    def _read_between(self, parsed: Parsed) -> None:
        marks, text = self._marks, self._text.lstrip()
        if text == marks.parameter:
            self._text, self._read = "", self._read_key
        elif marks.whole[0] and text == marks.whole[0]:
            self._text, self._read = "", self._read_whole
        elif text == marks.call_end:
            parsed.arguments("}")
            self.complete = True
        elif marks.separator and text == marks.separator and not self._n_parameters:
            self._text = ""
        elif not any(
            mark.startswith(text) for mark in (marks.parameter, marks.call_end, marks.whole[0], marks.separator)
        ):
            parsed.arguments("}")
            raise MalformedCallError(f"a parameter begins with {text!r}")

    def _read_whole(self, parsed: Parsed) -> None:
        """All arguments as one JSON object, whose braces are written already."""
        end = self._marks.whole[1]
        if not self._text.endswith(end):
            return
        value = read_value(self._text.removesuffix(end))
        if not isinstance(value, dict) or self._n_parameters:
            parsed.arguments("}")
            raise MalformedCallError("the arguments are no object")
        parsed.arguments(json.dumps(value, ensure_ascii=False)[1:-1])
        self._text, self._read = "", self._read_between

    def _read_key(self, parsed: Parsed) -> None:
        if not self._text.endswith(self._marks.key_end):
            return
        key, _, attributes = self._text.removesuffix(self._marks.key_end).partition('" ')
        key = key.strip().rstrip('"')
        parsed.arguments(f"{', ' if self._n_parameters else ''}{json.dumps(key, ensure_ascii=False)}: ")
        self._n_parameters += 1
        kind = _kind_by(attributes.strip().rstrip('"')) or kind_of(self._properties.get(key))
        self._value = _Value(kind, self._marks)
        self._text, self._read = "", self._read_value_mark if self._marks.value else self._read_value

    def _read_value_mark(self, parsed: Parsed) -> None:
        text, (begin, end) = self._text.lstrip(), self._marks.typed
        if text == self._marks.value:
            self._text, self._read = "", self._read_value
        elif begin and text.startswith(begin):
            self._text = "" if text.endswith(end) else text
        elif not any(mark.startswith(text) for mark in (self._marks.value, begin)):
            parsed.arguments("null}")
            raise MalformedCallError(f"a value begins with {text!r}")

    def _read_value(self, parsed: Parsed) -> None:
        assert self._value is not None
        if self._value.ended(self._text, parsed):
            self._read = self._read_between
        self._text = ""


class JsonOrMarkupCall:
    """Reads one call in markup or in JSON."""

    def __init__(self, marks: Markup, schemas: Schemas, *, called: bool) -> None:
        """`called`: the mark before the call has been read."""
        self.begun = False
        self.complete = False
        self._marks = marks
        self._schemas = schemas
        self._called = called
        self._text = ""
        self._body: JsonCalls | MarkupCall | None = None

    def feed(self, char: str, parsed: Parsed) -> None:
        """Read a character. Raises MalformedCallError."""
        if self._body is None:
            self._open(char)
        if self._body is not None:
            self._body.feed(char, parsed)
            self.begun, self.complete = self._body.begun, self._body.complete

    def _open(self, char: str) -> None:
        self._text = (self._text + char).lstrip()
        if self._text and (self._called or self._text in "{["):
            json = char in "{["
            self._body = JsonCalls() if json else MarkupCall(self._marks, self._schemas, called=True)
        elif self._text == self._marks.call:
            self._called, self._text = True, ""
        elif not self._marks.call.startswith(self._text):
            raise MalformedCallError(f"a call begins with {self._text!r}")


class _Value:
    """Reads a value up to its end mark."""

    def __init__(self, kind: str, marks: Markup) -> None:
        """`kind`: `text` is a text, `other` is JSON, `open` is JSON if it can be read as such."""
        self._kind = kind
        self._end = marks.value_end
        self._lines = marks.lines
        self._ends = ("\n" + self._end, self._end) if marks.lines else (self._end,)
        self._begins = (_CDATA,) if marks.cdata else ()
        self._held = ""
        self._begun = False
        self._whole = ""
        self._opened = False

    def ended(self, char: str, parsed: Parsed) -> bool:
        """Read a character; returns whether the value has ended."""
        self._held += char
        if self._held in self._begins:
            self._held, self._begun, self._begins = "", True, ()
            self._ends = (f"{_CDATA_END}\n{self._end}", _CDATA_END + self._end)
        if self._held in self._ends:
            self._close(parsed)
            return True
        while self._held and not any(mark.startswith(self._held) for mark in (*self._begins, *self._ends)):
            self._begins = self._begins if self._held[0] == "\n" else ()
            self._pass_on(self._held[0], parsed)
            self._held = self._held[1:]
            if self._held in self._ends:
                self._close(parsed)
                return True
        return False

    def _pass_on(self, char: str, parsed: Parsed) -> None:
        first, self._begun = not self._begun, True
        if first and self._lines and char == "\n":
            return
        if self._kind == "text":
            self._open(parsed)
            parsed.arguments(json.dumps(char, ensure_ascii=False)[1:-1])
        else:
            self._whole += char

    def _open(self, parsed: Parsed) -> None:
        if not self._opened:
            self._opened = True
            parsed.arguments('"')

    def _close(self, parsed: Parsed) -> None:
        if self._kind == "text":
            self._open(parsed)
            parsed.arguments('"')
        else:
            parsed.arguments(json.dumps(read_value(self._whole), ensure_ascii=False))


def _kind_by(attributes: str) -> str:
    """How a parameter's value is read, by its own attributes; empty: they do not say."""
    if attributes in ('string="true', 'type="string'):
        return "text"
    return "other" if attributes.startswith(("string=", "type=")) else ""


def kind_of(schema: object) -> str:
    """How a parameter's value is read, by its schema."""
    if not isinstance(schema, Mapping):
        return "open"
    types = schema.get("type")
    if types == "string" or (types is None and all(isinstance(one, str) for one in schema.get("enum") or [0])):
        return "text"
    return "open" if types is None or (isinstance(types, list) and "string" in types) else "other"


def read_value(text: str) -> object:
    """A value that was written as JSON or as Python; any other text is a text."""
    stripped = text.strip()
    try:
        return json.loads(stripped, parse_constant=lambda name: name)
    except (ValueError, RecursionError):
        pass
    try:
        value = ast.literal_eval(stripped)
        json.dumps(value, allow_nan=False)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return text
    return value
