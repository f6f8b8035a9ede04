"""Reasoning is taken out of a text, in whatever pieces it comes."""

from __future__ import annotations

import pytest

from services.gateway.reasoning.think import ReasoningParser, tags_of

THINK = ("<think>", "</think>")


def read(pieces: list[str], *, inside: bool) -> tuple[str, str]:
    parser = ReasoningParser(THINK, inside=inside)
    parts = [*map(parser.push, pieces), parser.finish()]
    return "".join(part[0] for part in parts), "".join(part[1] for part in parts)


@pytest.mark.parametrize(
    ("text", "inside", "reasoning", "answer"),
    [
        (
            "<think>\na < b </thin\n</think>\n\nYes, <think> is a tag.",
            False,
            "\na < b </thin\n",
            "Yes, <think> is a tag.",
        ),
        (" \n<think></think>Yes", False, "", "Yes"),
        ("a</think> b </think>", True, "a", "b </think>"),
        ("never ends </thi", True, "never ends </thi", ""),
        ("<thin air", False, "", "<thin air"),
        ("  plain <think>no</think>", False, "", "  plain <think>no</think>"),
        ("<thi", False, "", "<thi"),
        ("", False, "", ""),
    ],
)
def test_reasoning_is_independent_of_the_chunks_of_the_text(
    text: str, inside: bool, reasoning: str, answer: str
) -> None:
    assert read([text], inside=inside) == (reasoning, answer)
    for at in range(len(text) + 1):
        assert read([text[:at], text[at:]], inside=inside) == (reasoning, answer), text[:at]
    assert read(list(text), inside=inside) == (reasoning, answer)


def test_the_chat_template_says_whether_a_model_reasons() -> None:
    assert tags_of("... '<think>\\n' ...") == THINK
    assert tags_of("{{ messages }}") is None
