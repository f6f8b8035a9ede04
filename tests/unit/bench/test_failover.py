from __future__ import annotations

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from bench.failover import divide, parts
from bench.serve import Answer

EPOCH_NS = 1_700_000_000_000_000_000  # start of the answers' clock
KILLED_NS = EPOCH_NS + 10_100_000_000
ANSWER = Answer(began=10.0, token_times=[0.08, 0.09, 0.1, 0.17, 0.18])  # a pause of 70 ms, in which the kill lies


def span(name: str, start_s: float, end_s: float, *submitted_s: float) -> tuple[str, Span]:
    events = [Span.Event(name="submitted", time_unix_nano=EPOCH_NS + round(at * 1e9)) for at in submitted_s]
    start, end = (EPOCH_NS + round(at * 1e9) for at in (start_s, end_s))
    return name, Span(name=name, start_time_unix_nano=start, end_time_unix_nano=end, events=events)


def trace(*submitted_s: float) -> dict[str, tuple[str, Span]]:
    spans = [
        span("POST /v1/completions", 10.0, 10.2, *submitted_s),
        span("worker.queue", 10.125, 10.13),
        span("worker.prefill", 10.13, 10.165),
    ]
    return {name: ("service", found) for name, found in spans}


def test_a_pause_is_divided_by_its_trace() -> None:
    pause = divide(ANSWER, trace(10.01, 10.12), KILLED_NS, EPOCH_NS)
    assert pause is not None
    assert pause.whole == pytest.approx(70)
    assert pause.usual == pytest.approx(10)
    assert pause.submitted == pytest.approx(20)
    assert pause.prefill == pytest.approx(40)
    assert pause.beyond == pytest.approx(30)
    assert dict(parts([pause]))["beyond re-prefill"] == [pause.beyond]


def test_a_stream_that_stayed_has_no_pause() -> None:
    assert divide(ANSWER, trace(10.01), KILLED_NS, EPOCH_NS) is None
