"""What a grammar may cost: the same bounds where it is admitted and where it is followed; why one fails, in words.

A grammar travels as llguidance writes it: a Lark grammar, or JSON that holds schemas and Lark grammars.
"""

from __future__ import annotations

import re

from llguidance import LLParserLimits

MAX_GRAMMAR_BYTES = 64 * 1024

_NO_TEXT = "no text follows it: it contradicts itself, refers to itself without end, or matches nothing"
_TOO_COSTLY = "one of its steps costs too much: make repetitions and alternatives smaller"
_WORDS = (
    (r"NoExtension(?:Bias)?\b", _NO_TEXT),
    (r"lexer error: .*|(?:Lexer|Parser)TooComplex\b.*", _TOO_COSTLY),
    (r"oneOf constraints are not.*", "`oneOf` is not supported where two of its schemas may hold"),
    (r"Resource '(.*?)' is not present .*", r"`$ref` to `\1` is not supported: it is another document"),
    (r"Pointer '(.*?)' does not exist", r"`$ref` points to `\1`, which does not exist"),
    (r"Parser Error: .*", "the text before does not follow it"),
    (r"^(?:at )?(\d+)\((\d+)\): lexer error", r"line \1, column \2: a character or escape that Lark does not know"),
    (r"^(?:at )?(\d+)\((\d+)\): ", r"line \1, column \2: "),
)
_QUOTED = re.compile(r"(?m)^ +\d+ \| .*$|^ +\^+$")


def explain(error: str) -> str:
    """Why llguidance refuses a grammar, without its internal words and the lines that it quotes."""
    found = _QUOTED.sub("", error.replace("<non-verbose/>", "")).strip()
    for words, said in _WORDS:
        found = re.sub(words, said, found)
    return " ".join(found.split())


def parser_limits() -> LLParserLimits:
    """Bounds of one grammar's memory and of the work of one step (about 10 ms), counted, so equal on all machines."""
    return LLParserLimits(
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=100_000,
        step_max_items=50_000,
        max_lexer_states=50_000,
        max_grammar_size=200_000,
        verbose_errors=False,  # they would quote the grammar in logs
    )
