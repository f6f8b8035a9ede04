"""Reasoning is taken out of a text, in whatever pieces it comes."""

from __future__ import annotations

import pytest

from services.gateway.reasoning.formats import FORMATS, ReasoningFormat, reasoning_of
from services.gateway.reasoning.think import ReasoningParser

THINK = next(form for form in FORMATS if form.signs == ("<think>",))


def read(
    pieces: list[str], *, inside: bool, form: ReasoningFormat = THINK, calls: tuple[str, ...] = ()
) -> tuple[str, str]:
    parser = ReasoningParser(form, inside=inside, calls=calls)
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
    assert reasoning_of("... '<think>\\n' ...") is THINK
    assert reasoning_of("{{ messages }}") is None


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.models)
def test_every_format_of_reasoning_is_chosen_by_its_template_and_read_in_any_pieces(form: ReasoningFormat) -> None:
    assert reasoning_of(f"a template with {' and '.join(form.signs)}") is form
    opened = form.answer[:1] if len(form.answer) > 1 else ()
    closed = form.answer[1:2] if form.answer[1:2] and form.answer[1].startswith(("</", "<|END")) else ()
    for begin in form.begins:
        text = f"{begin}\na < b, {form.end[:3]} no end\n{form.end}\n{''.join(opened)}Yes, {begin[:4]}.{''.join(closed)}"
        expected = (f"\na < b, {form.end[:3]} no end\n", f"Yes, {begin[:4]}.")
        for at in range(len(text) + 1):
            assert read([text[:at], text[at:]], inside=False, form=form) == expected, text[:at]
        assert read(list(text), inside=False, form=form) == expected
        assert read(list(text[len(begin) :]), inside=True, form=form) == expected


def test_reasoning_ends_with_the_mark_of_another_effort() -> None:
    form = next(form for form in FORMATS if form.models == "K2 Horizon")
    for text in ("<ifm|think_faster>So.</ifm|think_faster>Hi.", "<ifm|think_fast>So.</ifm|think>\nHi."):
        for at in range(len(text) + 1):
            assert read([text[:at], text[at:]], inside=False, form=form) == ("So.", "Hi.")


def test_harmony_has_channels_in_place_of_tags() -> None:
    form = FORMATS[0]
    call = "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}<|call|>"
    for text, expected in (
        ("<|channel|>final<|message|>Hi.<|return|>", ("", "Hi.")),
        (f"<|channel|>analysis<|message|>So.<|end|><|start|>assistant{call}", ("So.", f"<|start|>assistant{call}")),
        ("<|channel|>analysis<|message|>So.<|end|><|start|>assistant<|channel|>final<|message|>Hi.", ("So.", "Hi.")),
    ):
        for at in range(len(text) + 1):
            assert read([text[:at], text[at:]], inside=False, form=form) == expected


def test_call_within_reasoning_ends_the_reasoning() -> None:
    called = "<tool_call>\n<function=now>\n</function>\n</tool_call>"
    for text, expected in (
        (f"<think>So, a < b.\n{called}", ("So, a < b.\n", called)),
        (f"<think>So.</think>\n{called}", ("So.", called)),
        ("<think>So <tool_", ("So <tool_", "")),
    ):
        for at in range(len(text) + 1):
            assert read([text[:at], text[at:]], inside=False, calls=("<tool_call>",)) == expected, text[:at]
