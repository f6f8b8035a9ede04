"""Patterns of names and times are of whole texts: a newline at the end belongs to none."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest

from services.gateway.api.options import FunctionName
from services.gateway.api.schema import BatchBody, FineTuningBody
from services.gateway.http.admin import NewKey
from services.gateway.names.route import External
from services.gateway.tenants.hours import TimeOfDay
from tests.programs import CHART

JOB = {"model": "m", "training_file": "file-1"}
BATCH = {"input_file_id": "f", "endpoint": "/v1/completions"}


@pytest.mark.parametrize(
    ("kind", "of", "text"),
    [
        (FunctionName, lambda text: text, "look"),
        (TimeOfDay, lambda text: text, "08:00"),
        (FineTuningBody, lambda text: {**JOB, "suffix": text}, "pirate"),
        (BatchBody, lambda text: {**BATCH, "completion_window": text}, "24h"),
        (NewKey, lambda text: {"name": text}, "team"),
        (External, lambda text: {"base_url": text}, "https://a.example/v1"),
    ],
)
def test_a_newline_at_the_end_of_a_text_is_refused(kind: Any, of: Any, text: str) -> None:
    msgspec.convert(of(text), kind)
    for wrong in (f"{text}\n", f"{text}\n\n", f"\n{text}"):
        with pytest.raises(msgspec.ValidationError, match="regex"):
            msgspec.convert(of(wrong), kind)


def test_no_pattern_ends_where_a_newline_may_follow() -> None:
    loose = re.compile(r"""pattern=.*\$["']""")
    services = CHART.parents[1] / "services"
    assert [str(path) for path in services.rglob("*.py") if loose.search(path.read_text())] == []
