"""Calls in Python: a list of them, `[get_weather(city="Oslo"), now()]`, or one on each line up to an end mark.

A call is passed on as a whole after its closing bracket, since its values are known only then.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Set
from keyword import iskeyword

from services.gateway.tools.calls import MalformedCallError, Parsed
from services.gateway.tools.quoting import with_escapes

# Characters of commands and files that models write into a text, and that a Python text may not have as they are.
_WRITTEN = {"\n": "\\n", "\r": "\\r", "\0": "\\x00"}
_BETWEEN = "[, \n\t"  # before a call
_PARAMETER = re.compile(r"(?<![\w.])([A-Za-z]+)\s*$")
_RESERVED = "__reserved"  # behind a parameter that has the name of a keyword, as `from`


class PythonCalls:
    """Reads the calls of one block."""

    def __init__(
        self, names: frozenset[str] | None, end: str = "", last: str = "", keys: Set[str] = frozenset()
    ) -> None:
        """`names`: a call of another function is content. `end`: the mark behind calls without a list around them.

        `last`: the mark behind the list; calls that Python cannot read are read up to it, with the quotes within their
        texts as texts. `keys`: the parameters of all tools.
        """
        self.begun = False
        self.complete = False
        self._names = names
        self._end = end
        self._last = last
        self._keys = keys
        self._raw = ""  # since the last call that was read
        self._unreadable = False
        self._text = ""
        self._depth = 0  # open brackets, including the list's
        self._quote = ""
        self._escaped = False

    def feed(self, char: str, parsed: Parsed) -> None:
        """Read a character. Raises MalformedCallError."""
        self._raw += char
        if self._last and self._raw.endswith(self._last):
            self._read_again(parsed)
        elif not self._unreadable:
            try:
                self._read(char, parsed)
            except MalformedCallError:
                if not self._last:
                    raise
                self._unreadable = True

    def _read(self, char: str, parsed: Parsed) -> None:
        if self._quote:
            self._text += char if self._escaped else _WRITTEN.get(char, char)
            self._quote = self._quote if self._escaped or char != self._quote else ""
            self._escaped = char == "\\" and not self._escaped
            return
        self._make_valid(char)
        self._text += char
        if char in "'\"":
            self._quote = char
        elif char in "[({":
            self._depth += 1
        elif char in "])}":
            self._close(parsed)
        elif self._end and self._text.lstrip(", \n\t") == self._end:
            self._finish()

    def _make_valid(self, char: str) -> None:
        """Drop zeros that lead a number, mark a parameter that has the name of a keyword, before this character."""
        if char.isdigit():
            before = self._text.rstrip("0")
            if before != self._text and not (before[-1:].isalnum() or before[-1:] in ("_", ".")):
                self._text = before
        elif char == "=" and (match := _PARAMETER.search(self._text)) and iskeyword(match[1]):
            self._text = f"{self._text[: match.end(1)]}{_RESERVED}"

    def _close(self, parsed: Parsed) -> None:
        self._depth -= 1
        if self._depth == (0 if self._end else 1) and self._text.endswith(")"):
            name, arguments = read_call(self._text.lstrip(_BETWEEN))
            if self._names is not None and name not in self._names:
                raise MalformedCallError(f"{name!r} is no tool")
            self.begun, self._text, self._raw = True, "", ""
            parsed.begin(name)
            parsed.arguments(arguments)
        elif self._depth == 0 and not self._end:
            self._finish()

    def _read_again(self, parsed: Parsed) -> None:
        """Read the calls since the last one that could be read, with the quotes within their texts."""
        calls = with_escapes(f"[{self._raw.removesuffix(self._last).lstrip(_BETWEEN)}", self._keys)
        if calls is None:
            raise MalformedCallError("a list that cannot be read")
        reader = PythonCalls(self._names)
        for char in calls:
            reader.feed(char, parsed)
            self.begun = self.begun or reader.begun
        self.complete = reader.complete
        if not self.complete:
            raise MalformedCallError("a list without an end")

    def _finish(self) -> None:
        if not self.begun:
            raise MalformedCallError("a list without calls")
        self.complete = True


def read_call(text: str) -> tuple[str, str]:
    """The name and the arguments, as JSON, of a Python call with literal keywords. Raises MalformedCallError."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a command's backslashes, which Python would write twice
            call = ast.parse(text.strip(), mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            raise MalformedCallError("not a call with keywords")
        named = ((keyword.arg, keyword.value) for keyword in call.keywords if keyword.arg is not None)
        values = {name.removesuffix(_RESERVED): _value(value) for name, value in named}
        return ast.unparse(call.func), json.dumps(values, ensure_ascii=False, allow_nan=False)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        raise MalformedCallError(str(error)) from error


def _value(node: ast.expr) -> object:
    """The value of a Python literal, or of JSON's true, false and null."""
    if isinstance(node, ast.Name) and node.id in ("true", "false", "null"):
        return {"true": True, "false": False, "null": None}[node.id]
    return ast.literal_eval(_Lists().visit(node))


class _Lists(ast.NodeTransformer):
    """Makes lists of sets, which JSON does not have."""

    def visit_Set(self, node: ast.Set) -> ast.List:
        """See :class:`ast.NodeTransformer`."""
        return ast.List([self.visit(element) for element in node.elts], ast.Load())
