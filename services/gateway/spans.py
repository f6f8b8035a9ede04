"""One span per request, between the caller's and the worker's W3C trace context."""

from __future__ import annotations

from opentelemetry import context, trace
from opentelemetry.trace import INVALID_SPAN, Span

from services.common.tracing import remote_context

REQUEST_ID = "ryzanstein.request_id"  # the answer's x-request-id
GENERATION_ID = "ryzanstein.generation_id"  # the `id` in the answer's body
FIRST_TOKEN_MS = "ryzanstein.first_token_ms"  # since the request's arrival; of the last sequence to begin


class RequestTracer:
    """Starts spans; with tracing off, it only forwards the caller's context."""

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled
        self._tracer = trace.get_tracer("ryzanstein.gateway")

    def begin(self, name: str, traceparent: str) -> Span:
        """Begin a request's span, which the caller ends; an empty or invalid `traceparent` is ignored."""
        if not self._enabled and not traceparent:
            return INVALID_SPAN
        caller = remote_context((("traceparent", traceparent),))
        if not self._enabled:
            return trace.get_current_span(caller)
        return self._tracer.start_span(name, context=caller, kind=trace.SpanKind.SERVER)


def attach(span: Span) -> None:
    """Make a span current for the rest of this task, so that its calls to other services carry it."""
    if span.get_span_context().is_valid:
        context.attach(trace.set_span_in_context(span))


def name_generation(generation_id: str) -> None:
    """Store the id of the answer's body on the current span."""
    span = trace.get_current_span()
    if span.is_recording():
        span.set_attribute(GENERATION_ID, generation_id)


def time_first_token(seconds: float) -> None:
    """Store the time to the first token on the current span, so that a collector can keep slow traces."""
    span = trace.get_current_span()
    if span.is_recording():
        span.set_attribute(FIRST_TOKEN_MS, round(seconds * 1000))


def note(event: str, **attributes: str | int | float) -> None:
    """Add an event to the current span, if there is one."""
    span = trace.get_current_span()
    if span.is_recording():
        span.add_event(event, attributes)
