"""Rewrites patterns without look-ahead, which zod and pydantic use and llguidance's automata do not support.

A look-ahead at the beginning of a pattern is a second pattern of the whole text: `^(?=X)Y` is `^X` and `^Y`. A negative
look-ahead needs its complement, which is known for the forms that libraries use. The result may match less than the
original pattern, never more.
"""

from __future__ import annotations

import re

# zod's `iso.duration()`, which has look-aheads inside
_DURATION = r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$"
_TIME = r"T(?:\d+H(?:\d+M)?(?:\d+(?:[.,]\d+)?S)?|\d+M(?:\d+(?:[.,]\d+)?S)?|\d+(?:[.,]\d+)?S)"
_DATE = r"(?:\d+Y(?:\d+M)?(?:\d+D)?|\d+M(?:\d+D)?|\d+D)"
_KNOWN = {_DURATION: [rf"^P(?:\d+W|{_DATE}(?:{_TIME})?|{_TIME})$"]}

_CLASS = r"\[(?:\\.|[^\]\\])*\]"
_AHEAD = re.compile(rf"\(\?([=!])((?:\\.|{_CLASS}|[^()\[\\|])*)\)")
_ATOM = rf"{_CLASS}|\\[^A-CE-RT-VX-Za-ce-rt-vx-z0-9]|[^\\\[\](){{}}.*+?^$|]"  # one character: a class or a literal
_FIRST = re.compile(rf"\^?({_ATOM})")
_ANYWHERE = re.compile(rf"\.\*({_ATOM})")
_TWICE = re.compile(rf"\.\*({_ATOM})\1")
_ONLY = re.compile(rf"\^?({_ATOM})\*\$")
_UNSUPPORTED = re.compile(r"\(\?(?:[=!]|<[=!])|\\[bB1-9]|\\k<")
_ESCAPE_OR_CLASS = re.compile(rf"\\[^bB1-9k]|{_CLASS}")


def followable(pattern: str) -> list[str] | None:
    """Patterns without look-ahead that a text must all match instead of `pattern`; None if there are none."""
    if pattern in _KNOWN:
        return list(_KNOWN[pattern])
    patterns = []
    rest = pattern.removeprefix("^")
    while pattern.startswith("^") and (ahead := _AHEAD.match(rest)):
        part = f"^{ahead[2].removeprefix('^')}" if ahead[1] == "=" else _complement(ahead[2])
        if part is None:
            return None
        patterns.append(part)
        rest = rest[ahead.end() :]
    patterns.append(f"^{rest}" if patterns else pattern)
    if patterns[1:] and _has_alternatives(rest):
        return None  # `^` applies to the first alternative only
    return None if any(map(_is_unsupported, patterns)) else patterns


def _complement(ahead: str) -> str | None:
    """A pattern that matches texts which do not begin with a match of the look-ahead."""
    if only := _ONLY.fullmatch(ahead):
        return _negated(only[1])
    if twice := _TWICE.fullmatch(ahead):
        atom, other = twice[1], _negated(twice[1])
        return rf"^{other}*(?:{atom}{other}+)*(?:{atom})?$"
    if anywhere := _ANYWHERE.fullmatch(ahead):
        return rf"^{_negated(anywhere[1])}*$"
    if first := _FIRST.fullmatch(ahead):
        return rf"^(?:{_negated(first[1])}[\s\S]*)?$"
    return None


def _negated(atom: str) -> str:
    if not atom.startswith("["):
        return f"[^{atom}]"
    return f"[{atom[2:]}" if atom.startswith("[^") else f"[^{atom[1:]}"


def _has_alternatives(pattern: str) -> bool:
    """Whether the pattern has a `|` outside all groups."""
    depth = 0
    for char in _ESCAPE_OR_CLASS.sub("", pattern):
        depth += (char == "(") - (char == ")")
        if char == "|" and depth == 0:
            return True
    return False


def _is_unsupported(pattern: str) -> bool:
    return _UNSUPPORTED.search(_ESCAPE_OR_CLASS.sub("", pattern)) is not None
