"""No part of a stop string is ever emitted, however the text is cut into pieces."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from services.gateway.text.stops import StopBuffer

texts = st.text(alphabet="abc\n", max_size=40)
stop_lists = st.lists(st.text(alphabet="abc\n", min_size=1, max_size=5), min_size=1, max_size=4)


def cut(text: str, at: list[int]) -> list[str]:
    marks = [0, *sorted(min(mark, len(text)) for mark in at), len(text)]
    return [text[a:b] for a, b in pairwise(marks)]


def run(pieces: list[str], stops: list[str], *, include: bool) -> tuple[list[str], str | None]:
    buffer, out = StopBuffer(stops, include=include), []
    for piece in pieces:
        emitted = buffer.push(piece)
        out.append(emitted.text)
        if emitted.stopped is not None:
            return out, emitted.stopped
    return [*out, buffer.flush()], None


def reference(text: str, stops: list[str], *, include: bool) -> tuple[str, bool]:
    """Character by character: the first position at which the text read so far ends with a stop string."""
    for end in range(1, len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            return (text[:end] if include else text[: end - max(map(len, hits))]), True
    return text, False


@given(text=texts, stops=stop_lists, at=st.lists(st.integers(0, 40), max_size=8), include=st.booleans())
def test_any_cutting_gives_the_same_text(text: str, stops: list[str], at: list[int], include: bool) -> None:
    out, stopped = run(cut(text, at), stops, include=include)
    assert ("".join(out), stopped is not None) == reference(text, stops, include=include)


@given(text=texts, stops=stop_lists, at=st.lists(st.integers(0, 40), max_size=8))
def test_emitted_text_never_has_to_be_taken_back(text: str, stops: list[str], at: list[int]) -> None:
    final, _ = reference(text, stops, include=False)
    so_far = ""
    for piece in run(cut(text, at), stops, include=False)[0]:
        so_far += piece
        assert final.startswith(so_far)


def test_text_that_cannot_become_a_stop_string_is_not_delayed() -> None:
    buffer = StopBuffer(["STOP"], include=False)
    assert buffer.push("go on S").text == "go on "
    assert buffer.push("o").text == "So"


def test_text_is_never_held_back_without_stop_strings() -> None:
    buffer = StopBuffer([], include=False)
    assert buffer.push("S").text == "S"
    assert buffer.flush() == ""
