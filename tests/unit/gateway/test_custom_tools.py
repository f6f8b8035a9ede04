"""Calls of custom tools: the input is a text, in whatever form the model wrote the arguments."""

from __future__ import annotations

import pytest

from services.gateway.tools.custom import input_of


@pytest.mark.parametrize(
    ("arguments", "given"),
    [
        ('{"input": "a\\n"}', "a\n"),
        ('"a\\n"', "a\n"),
        ("a b", "a b"),
        ('{"input": 1}', '{"input": 1}'),
        ("[1]", "[1]"),
        ('{"input": "a', '{"input": "a'),
    ],
)
def test_input_is_the_argument_or_the_whole_text(arguments: str, given: str) -> None:
    assert input_of(arguments) == given
