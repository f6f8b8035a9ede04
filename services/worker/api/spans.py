"""Traces requests in the worker: a span for each request, with children for queue, prefill and decode."""

from __future__ import annotations

import time
from dataclasses import dataclass

from opentelemetry import trace
from opentelemetry.trace import Span

from services.common.tracing import remote_context
from services.worker.engine.output import Prefill
from services.worker.engine.request import EngineRequest


@dataclass(slots=True)
class _Open:
    """The open spans of a request, and what its steps verified."""

    request: Span
    decode: Span | None = None
    drafted_tokens: int = 0
    accepted_tokens: int = 0


class RequestSpans:
    """Open spans by request; empty while tracing is off."""

    def __init__(self) -> None:
        self._tracer = trace.get_tracer("ryzanstein.worker")
        self._open: dict[EngineRequest, _Open] = {}

    def begin(self, request: EngineRequest, traceparent: str) -> None:
        """Start the span of a new request."""
        span = self._tracer.start_span(
            "worker.request",
            context=remote_context((("traceparent", traceparent),)) if traceparent else None,
            attributes={
                "ryzanstein.generation_id": request.request_id,
                "ryzanstein.attempt": request.attempt,
                "ryzanstein.prompt_tokens": len(request.prompt_ids),
            },
        )
        if span.is_recording():
            self._open[request] = _Open(span)

    def prefilled(self, request: EngineRequest, prefill: Prefill) -> None:
        """At the first output, record the spans of queue and prefill and start the span of the decode."""
        if (opened := self._open.get(request)) is None:
            return
        opened.request.add_event("first output", {"cached_tokens": prefill.cached_tokens})
        context = trace.set_span_in_context(opened.request)
        now = time.time_ns()
        clock = now - time.monotonic_ns()  # the engine's times are monotonic
        queued, admitted = (int(t * 1e9) + clock for t in (prefill.queued_at, prefill.admitted_at))
        self._tracer.start_span("worker.queue", context, start_time=queued).end(admitted)
        tokens = {
            "ryzanstein.prompt_tokens": len(request.prompt_ids),
            "ryzanstein.cached_tokens": prefill.cached_tokens,
        }
        self._tracer.start_span("worker.prefill", context, attributes=tokens, start_time=admitted).end(now)
        opened.decode = self._tracer.start_span("worker.decode", context, start_time=now)

    def verified(self, request: EngineRequest, drafted: int, accepted: int) -> None:
        """Count drafted tokens that a step verified, and those of them that were drawn."""
        if (opened := self._open.get(request)) is not None:
            opened.drafted_tokens += drafted
            opened.accepted_tokens += accepted

    def end(self, request: EngineRequest, how: str, n_generated: int | None = None) -> None:
        """End the spans of a request."""
        opened = self._open.pop(request, None)
        if opened is None:
            return
        if n_generated is not None:
            opened.request.set_attribute("ryzanstein.generated_tokens", n_generated)
        if opened.drafted_tokens:
            opened.request.set_attribute("ryzanstein.drafted_tokens", opened.drafted_tokens)
            opened.request.set_attribute("ryzanstein.accepted_tokens", opened.accepted_tokens)
        opened.request.set_attribute("ryzanstein.end", how)
        if opened.decode is not None:
            opened.decode.end()
        opened.request.end()
