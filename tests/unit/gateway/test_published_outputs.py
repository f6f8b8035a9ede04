"""The exact forms of answers are read as reasoning, content and calls, in any pieces that they stream in."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest

from services.gateway.generation.message import MessageReader
from services.gateway.generation.tokens import FinishReason
from services.gateway.reasoning.formats import FORMATS as REASONING
from services.gateway.reasoning.formats import reasoning_of
from services.gateway.reasoning.think import ReasoningParser
from services.gateway.tools.calls import CallDelta, join_calls
from services.gateway.tools.formats import FORMATS, PARSERS
from services.gateway.tools.parser import ToolParser
from tests.unit.gateway.published_outputs import ANSWERS, SCHEMAS, Published

SOURCES = tomllib.loads((Path(__file__).parents[3] / "docs" / "reference" / "parsers.toml").read_text())
TOKEN = re.compile(r"<[^<>\s]{1,40}>|\s?\w+|.", re.DOTALL)  # control tokens are whole, as are words


def read(answer: Published, pieces: Sequence[str]) -> tuple[str, str, list[tuple[str, object]]]:
    """Reasoning, content and calls."""
    native = PARSERS.get(answer.parser)
    form = reasoning_of(answer.template)
    marks = native.ends_reasoning(frozenset(SCHEMAS)) if native else ()
    reasons = ReasoningParser(form, inside=answer.inside, calls=marks) if form else None
    calls = ToolParser(native, frozenset(SCHEMAS), SCHEMAS) if native else None
    reader = MessageReader(reasons, calls, FinishReason.TOOL_CALLS)
    deltas = [*(reader.read([piece], final=False) for piece in pieces), reader.read([], final=True)]
    joined: list[CallDelta] = []
    for delta in deltas:
        join_calls(joined, delta.calls)
    whole = [(call.name or "", json.loads(call.arguments)) for call in joined]
    return "".join(delta.reasoning for delta in deltas), "".join(delta.content for delta in deltas), whole


@pytest.mark.parametrize("answer", ANSWERS, ids=lambda answer: answer.parser or answer.template)
def test_published_form_is_read_in_any_pieces(answer: Published) -> None:
    text = answer.text
    by_size = [[text[at : at + n] for at in range(0, len(text), n)] for n in (1, 2, 3, 5, 8)]
    cuts = [[text], TOKEN.findall(text), *by_size]
    assert "".join(cuts[1]) == text
    for pieces in cuts:
        assert read(answer, pieces) == (answer.reasoning, answer.content, list(answer.calls)), pieces[:3]


def test_every_parser_has_a_published_form() -> None:
    read_forms = {answer.parser for answer in ANSWERS} - {""}
    assert read_forms == set(SOURCES["calls"]) == set(FORMATS) - {"generic"}


def test_every_form_of_reasoning_has_a_source_and_an_answer() -> None:
    forms = {form.models for answer in ANSWERS if (form := reasoning_of(answer.template))}
    assert set(SOURCES["reasoning"]) == forms == {form.models for form in REASONING}
