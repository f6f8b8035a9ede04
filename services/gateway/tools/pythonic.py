"""Calls in Python: a list of them, `[get_weather(city="Oslo"), now()]`, or one on each line up to an end mark.

A call is passed on as a whole after its closing bracket, since its values are known only then.
"""

from __future__ import annotations

import ast
import json

from services.gateway.tools.calls import MalformedCallError, Parsed

# Characters of commands and files that models write into a text, and that a Python text may not have as they are.
_WRITTEN = {"\n": "\\n", "\r": "\\r", "\0": "\\x00"}


class PythonCalls:
    """Reads the calls of one block."""

    def __init__(self, names: frozenset[str] | None, end: str = "") -> None:
        """`names`: a call of another function is content. `end`: the mark behind calls without a list around them."""
        self.begun = False
        self.complete = False
        self._names = names
        self._end = end
        self._text = ""
        self._depth = 0  # open brackets, including the list's
        self._quote = ""
        self._escaped = False

    def feed(self, char: str, parsed: Parsed) -> None:
        """Read a character. Raises MalformedCallError."""
        self._text += _WRITTEN.get(char, char) if self._quote and not self._escaped else char
        if self._quote:
            self._quote = self._quote if self._escaped or char != self._quote else ""
            self._escaped = char == "\\" and not self._escaped
        elif char in "'\"":
            self._quote = char
        elif char in "[({":
            self._depth += 1
        elif char in "])}":
            self._close(parsed)
        elif self._end and self._text.lstrip(", \n\t") == self._end:
            self._finish()

    def _close(self, parsed: Parsed) -> None:
        self._depth -= 1
        if self._depth == (0 if self._end else 1) and self._text.endswith(")"):
            name, arguments = read_call(self._text.lstrip("[, \n\t"))
            if self._names is not None and name not in self._names:
                raise MalformedCallError(f"{name!r} is no tool")
            self.begun, self._text = True, ""
            parsed.begin(name)
            parsed.arguments(arguments)
        elif self._depth == 0 and not self._end:
            self._finish()

    def _finish(self) -> None:
        if not self.begun:
            raise MalformedCallError("a list without calls")
        self.complete = True


def read_call(text: str) -> tuple[str, str]:
    """The name and the arguments, as JSON, of a Python call with literal keywords. Raises MalformedCallError."""
    try:
        call = ast.parse(text.strip(), mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            raise MalformedCallError("not a call with keywords")
        values = {keyword.arg: _value(keyword.value) for keyword in call.keywords if keyword.arg is not None}
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
