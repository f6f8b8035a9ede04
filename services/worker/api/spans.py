"""Traces requests in the worker: a span for each request, with children for queue, prefill and decode."""

from __future__ import annotations

import time

from opentelemetry import trace
from opentelemetry.trace import Span

from services.common.tracing import remote_context
from services.worker.engine.output import Prefill
from services.worker.engine.request import EngineRequest


class RequestSpans:
    """Open spans by request; empty while tracing is off."""

    def __init__(self) -> None:
        self._tracer = trace.get_tracer("ryzanstein.worker")
        self._open: dict[EngineRequest, list[Span]] = {}  # the request's span, then the span of its decode

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
            self._open[request] = [span]

    def prefilled(self, request: EngineRequest, prefill: Prefill) -> None:
        """At the first output, record the spans of queue and prefill and start the span of the decode."""
        if (spans := self._open.get(request)) is None:
            return
        spans[0].add_event("first output", {"cached_tokens": prefill.cached_tokens})
        context = trace.set_span_in_context(spans[0])
        now = time.time_ns()
        clock = now - time.monotonic_ns()  # the engine's times are monotonic
        queued, admitted = (int(t * 1e9) + clock for t in (prefill.queued_at, prefill.admitted_at))
        self._tracer.start_span("worker.queue", context, start_time=queued).end(admitted)
        tokens = {
            "ryzanstein.prompt_tokens": len(request.prompt_ids),
            "ryzanstein.cached_tokens": prefill.cached_tokens,
        }
        self._tracer.start_span("worker.prefill", context, attributes=tokens, start_time=admitted).end(now)
        spans.append(self._tracer.start_span("worker.decode", context, start_time=now))

    def end(self, request: EngineRequest, how: str, n_generated: int | None = None) -> None:
        """End the spans of a request."""
        spans = self._open.pop(request, None)
        if spans is None:
            return
        if n_generated is not None:
            spans[0].set_attribute("ryzanstein.generated_tokens", n_generated)
        spans[0].set_attribute("ryzanstein.end", how)
        for span in reversed(spans):
            span.end()
