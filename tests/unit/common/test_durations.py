from __future__ import annotations

import pytest

from services.common.durations import read_duration


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("5m", 300), ("1h30m", 5400), ("90", 90), ("0", 0), ("-1", -1), ("-2m", -120), ("1.5s", 1.5), ("2d", 172_800)],
)
def test_durations_are_read_in_seconds(text: str, seconds: float) -> None:
    assert read_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "m", "5 m", "1e3", "5x", "5m-1s", "inf", "nan", "٣m", "1.m", ".5s"])
def test_other_texts_are_refused_with_examples(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected seconds, or numbers with units .*, found"):
        read_duration(text)
