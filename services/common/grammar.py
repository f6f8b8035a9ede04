"""Bounds on the cost of a grammar, equal for the gateway, which admits it, and the worker, which follows it.

Also messages that explain why a grammar fails. A grammar is sent in llguidance's format: a Lark grammar, or JSON with
schemas and Lark grammars.
"""

from __future__ import annotations

import re

from llguidance import LLParserLimits

MAX_GRAMMAR_BYTES = 64 * 1024

_NO_TEXT = "no text follows it: it contradicts itself, refers to itself without end, or matches nothing"
_TOO_COSTLY = "one of its steps costs too much: make repetitions and alternatives smaller"
_WORDS = (
    (r"recursion limit exceeded.*", "it is nested too deeply"),
    (r"NoExtension(?:Bias)?\b", _NO_TEXT),
    (r"lexer error: .*|(?:Lexer|Parser)TooComplex\b.*", _TOO_COSTLY),
    (r"oneOf constraints are not.*", "`oneOf` is not supported where two of its schemas may hold"),
    (r"Resource '(.*?)' is not present .*", r"`$ref` to `\1` is not supported: it is another document"),
    (r"Pointer '(.*?)' does not exist", r"`$ref` points to `\1`, which does not exist"),
    (
        r".*patternProperty regexes (/.*/) and (/.*/) are (?:not )?disjoint",
        r"`patternProperties` has \1 and \2, which may match the same name: make them exclude each other",
    ),
    (r"Parser Error: .*", "the text before does not follow it"),
    (r"^(?:at )?(\d+)\((\d+)\): lexer error", r"line \1, column \2: a character or escape that Lark does not know"),
    (r"^(?:at )?(\d+)\((\d+)\): ", r"line \1, column \2: "),
)
_QUOTED = re.compile(r"(?m)^ +\d+ \| .*$|^ +\^+$")


def explain(error: str) -> str:
    """Rewrite an error of llguidance without its internal terms and the lines that it quotes."""
    text = _QUOTED.sub("", error.replace("<non-verbose/>", "")).strip()
    for words, plain in _WORDS:
        text = re.sub(words, plain, text)
    return " ".join(text.split())


def parser_limits() -> LLParserLimits:
    """Bounds on a grammar's memory and on the work of a step (about 10 ms), as counts: the same on all machines."""
    return LLParserLimits(
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=100_000,
        step_max_items=50_000,
        max_lexer_states=50_000,
        max_grammar_size=200_000,
        verbose_errors=False,  # verbose errors would quote the grammar in logs
    )
