"""The events of a stream are the same for all pieces in which it arrives."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ryzanstein_client import ServerError, StreamInterrupted, Unavailable
from ryzanstein_client.rest.frames import FrameReader, text_frame
from ryzanstein_client.rest.sse import SseParser

LINES = st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]), max_size=12)
ENDS = st.sampled_from(["\n", "\r\n", "\r"])
CUTS = st.lists(st.integers(0, 400), max_size=12)


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({0, len(data), *(min(cut, len(data)) for cut in cuts)})
    return [data[start:end] for start, end in pairwise(places)] + [b""]


def parsed(parts: list[bytes]) -> list[str]:
    parser = SseParser()
    return [event for part in parts for event in parser.feed(part)]


@given(events=st.lists(st.lists(LINES, min_size=1, max_size=3), max_size=5), end=ENDS, cuts=CUTS, mark=st.booleans())
def test_events_are_parsed_unchanged(events: list[list[str]], end: str, cuts: list[int], mark: bool) -> None:
    text = "".join("".join(f"data: {line}{end}" for line in event) + end for event in events)
    data = (b"\xef\xbb\xbf" if mark else b"") + text.encode()
    assert parsed(pieces(data, cuts)) == ["\n".join(event) for event in events]


FRAGMENTS = st.sampled_from([b"data", b":", b" ", b"\r", b"\n", b"event: x", b"id", b"\xf0\x9f\x99\x82", b"\xff", b"a"])


@given(data=st.lists(FRAGMENTS, max_size=40).map(b"".join), cuts=CUTS)
def test_any_bytes_in_any_pieces_are_the_bytes_at_once(data: bytes, cuts: list[int]) -> None:
    assert parsed(pieces(data, cuts)) == parsed([data])


@pytest.mark.parametrize(
    ("data", "events"),
    [
        (b": comment\nevent: x\nid: 7\nretry: 10\ndata: a\n\n", ["a"]),
        (b"data:a\n\ndata:  b\n\n", ["a", " b"]),
        (b"data\n\n", [""]),
        (b"\n\n\ndata: a\n\n\n", ["a"]),
        (b"data: unfinished\n", []),
        (b"data: a\r\rdata: b\r\n\r\n", ["a", "b"]),
    ],
)
def test_the_standards_corners(data: bytes, events: list[str]) -> None:
    assert parsed([data]) == events
    assert parsed([bytes([byte]) for byte in data]) == events


def stream(*frames: object) -> bytes:
    return b"".join(b"data: " + json.dumps(frame).encode() + b"\n\n" for frame in frames)


def frame(text: str, finish: str | None = None) -> dict[str, object]:
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish}
    return {"id": "cmpl-1", "model": "m", "choices": [choice], "usage": None}


USAGE = {"id": "cmpl-1", "model": "m", "choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}
WHOLE = stream(frame("Grüße, "), frame(""), frame("🙂!"), frame("", "stop"), USAGE) + b"data: [DONE]\n\n"


@given(cuts=CUTS)
def test_chunks_of_any_pieces(cuts: list[int]) -> None:
    reader = FrameReader(text_frame)
    chunks = [chunk for part in pieces(WHOLE, cuts) for chunk in reader.feed(part)]
    assert [chunk.text for chunk in chunks] == ["Grüße, ", "🙂!"]
    last = reader.last()
    assert (last.finish_reason, last.usage and last.usage.total_tokens, last.model) == ("stop", 5, "m")


@pytest.mark.parametrize("cut", [len(WHOLE) - 1, len(WHOLE) - 10, 100, 0])
def test_a_stream_without_its_end_is_no_stream(cut: int) -> None:
    reader = FrameReader(text_frame)
    list(reader.feed(WHOLE[:cut]))
    with pytest.raises(Unavailable, match="ended before"):
        reader.last()


def test_error_is_raised_after_the_chunks_received_earlier() -> None:
    failure = {"error": {"message": "broken", "type": "server_error", "param": None, "code": "poison"}, "usage": {}}
    chunks = FrameReader(text_frame).feed(stream(frame("a"), frame("b"), failure))
    assert [next(chunks).text, next(chunks).text] == ["a", "b"]
    with pytest.raises(ServerError, match="broken") as caught:
        next(chunks)
    assert caught.value.code == "poison"
    assert StreamInterrupted("ab", (), caught.value).text == "ab"
