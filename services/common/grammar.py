"""What a grammar may cost: the same bounds where it is admitted and where it is followed.

A grammar travels as llguidance writes it: a Lark grammar, or JSON that holds schemas and Lark grammars.
"""

from __future__ import annotations

from llguidance import LLParserLimits

MAX_GRAMMAR_BYTES = 64 * 1024


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
