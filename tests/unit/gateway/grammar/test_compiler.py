"""GBNF as Lark, and why grammars fail, in words that their writers know."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from llguidance import LLMatcher

from services.common.grammar import explain
from services.gateway.grammar.compiler import as_lark, compile_error, serve
from tests.unit.gateway.grammar.writing import accepts, matcher_of, vocabulary
from tests.unit.gateway.made_tokenizers import byte_level


@pytest.mark.parametrize(
    ("gbnf", "allowed", "refused"),
    [
        (r'"\u0042"', "B", "C"),
        (r'"\u00e9\u2028"', "é\u2028", "e"),
        (r'"\U0001F600"', "😀", "😁"),
        (r"[\u0041-\u0043]", "B", "D"),
        (r"[\U0001F600-\U0001F64F]", "😁", "x"),
        (r"[^\u0041]", "b", "A"),
        (r'"\u0022\u005c"', '"\\', '"'),
        (r"[\u005d\u002d\u005e\u0061]+", "]-^a", "b"),
        (r"[\u0000-\u001f\u002f]+", "\n\t\0/", " "),
        (r'"\\u0042"', r"\u0042", "B"),
        (r'"\x42\xe9" [\x41-\x43]', "BéA", "BéD"),
    ],
)
def test_gbnf_escapes_match_their_characters(gbnf: str, allowed: str, refused: str) -> None:
    grammar = as_lark(f"root ::= {gbnf}")
    assert accepts(grammar, allowed)
    assert not accepts(grammar, refused)


@pytest.mark.parametrize("gbnf", [r'"\ud83d"', r"[\U00110000]", r'"\u12"', r'"\q"'])
def test_gbnf_escapes_of_no_character_are_refused(gbnf: str) -> None:
    with pytest.raises(ValueError, match=r"no character|escape"):
        as_lark(f"root ::= {gbnf}")


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        (LLMatcher.grammar_from_regex(r"[^\s\S]"), "no text follows it"),
        ('start: X\nX: "a" & "b"', "no text follows it"),
        ("start: a\na: a", "no text follows it"),
        ('start: "\\u42"', "line 1, column 13: a character or escape that Lark does not know"),
        ('start: "a" &', "line 1, column 8: & is only supported for tokens"),
        ("start: foo", 'line 1, column 8: unknown name: "foo"'),
        ("start: /[/", "unclosed character class"),
        (LLMatcher.grammar_from_regex("(x{3000}y){3000}"), "costs too much"),
        ('start: %json {"$ref": "http://x/y"}', "`$ref` to `http://x/y` is not supported"),
        (
            'start: %json {"patternProperties": {"^a": {}, "b$": {}}}',
            "`patternProperties` has /^a/ and /b$/, which may",
        ),
        ("start: %json " + '{"items": ' * 200 + "{}" + "}" * 200, "it is nested too deeply"),
        ('start: %json {"oneOf": [{"type": "number"}, {"type": "integer"}]}', "`oneOf` is not supported where"),
    ],
)
def test_errors_have_no_internal_words(grammar: str, words: str) -> None:
    error = compile_error(vocabulary(), grammar) or ""
    if not error:  # an error that only a step finds
        matcher = matcher_of(grammar)
        for token in vocabulary().tokenize_str("xxx"):
            matcher.consume_token(token)
            matcher.compute_bitmask()
        error = explain(matcher.get_error())
    assert words in error
    assert not any(word in error for word in ("Bias", "non-verbose", "coerce", "lexer", "retriev", " | ", "\n")), error


def answers(*requests: dict[str, Any]) -> list[dict[str, Any]]:
    """The process's answers to the requests."""
    messages = [json.dumps({"model": "m", **request}).encode() for request in requests]
    written, actual = io.BytesIO(), []
    serve(io.BytesIO(b"".join(len(message).to_bytes(4, "little") + message for message in messages)), written)
    written.seek(0)
    while head := written.read(4):
        actual.append(json.loads(written.read(int.from_bytes(head, "little"))))
    return actual


def test_grammars_are_answered_in_order() -> None:
    tokenizer = byte_level()
    introduced = {"tokenizer": tokenizer.to_str(), "vocab_size": tokenizer.get_vocab_size(), "eos": [1]}
    lark, deep = 'start: "a"', "root ::= " + "(" * 4_000
    long = 'root ::= "a' + "\n" * 20 + '"' + ' | "b"' * 12_000
    grammars = {'root ::= "a"': True, "start: b": False, lark: True, 'root ::= "a': True, deep: True, long: True}
    actual = answers(introduced, *({"grammar": text, "foreign": foreign} for text, foreign in grammars.items()))
    converted, wrong, same, broken, nested, large = actual
    assert (converted["error"], accepts(converted["grammar"], "a")) == (None, True)
    assert (wrong.get("grammar"), "unknown name" in wrong["error"]) == (None, True)
    assert same == {"error": None, "grammar": lark}
    assert broken.keys() == {"error"}
    assert nested == {"error": "it is nested too deeply"}
    assert "it may have at most 65536 bytes in Lark's form" in large["error"]


def test_a_tokenizer_that_llguidance_can_not_read_refuses_every_grammar() -> None:
    (actual,) = answers({"tokenizer": "{}", "vocab_size": 8, "eos": []}, {"grammar": 'start: "a"', "foreign": False})
    assert actual["error"].startswith("This model's tokenizer cannot be constrained: ")
