"""The worker's part of a request's trace: its span has children for the queue, the prefill and the decode."""

from __future__ import annotations

import time

from opentelemetry import trace
from opentelemetry.trace import INVALID_SPAN, Span

from services.worker.scheduling.request import Request


def prefilled(span: Span, request: Request) -> Span:
    """The first output is here: write down the queue and the prefill before it; returns the span of the decode."""
    if not span.is_recording():
        return INVALID_SPAN
    tracer, context = trace.get_tracer("ryzanstein.worker"), trace.set_span_in_context(span)
    now = time.time_ns()
    clock = now - time.monotonic_ns()  # the scheduler's times are monotonic
    queued, admitted = (int(t * 1e9) + clock for t in (request.queued_at, request.admitted_at))
    tracer.start_span("worker.queue", context, start_time=queued).end(admitted)
    tokens = {"ryzanstein.prompt_tokens": request.n_prompt, "ryzanstein.cached_tokens": request.cached_tokens}
    tracer.start_span("worker.prefill", context, attributes=tokens, start_time=admitted).end(now)
    return tracer.start_span("worker.decode", context, start_time=now)
