"""One span per request, with the caller's W3C trace context before it and the worker's after it."""

from __future__ import annotations

from opentelemetry import context, trace
from opentelemetry.trace import INVALID_SPAN, Span

from services.common.tracing import remote_context

REQUEST_ID = "ryzanstein.request_id"  # the answer's x-request-id
GENERATION_ID = "ryzanstein.generation_id"  # of one sequence: the `id` of the answer's body
FIRST_TOKEN_MS = "ryzanstein.first_token_ms"  # from the arrival of the request; of several sequences the last one's


class RequestTracer:
    """Starts spans; with tracing off it only passes the caller's context on."""

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled
        self._tracer = trace.get_tracer("ryzanstein.gateway")

    def begin(self, name: str, traceparent: str) -> Span:
        """The span of a request, to be ended by the caller; `traceparent` may be empty or nonsense."""
        if not self._enabled and not traceparent:
            return INVALID_SPAN
        caller = remote_context((("traceparent", traceparent),))
        if not self._enabled:
            return trace.get_current_span(caller)
        return self._tracer.start_span(name, context=caller, kind=trace.SpanKind.SERVER)


def attach(span: Span) -> None:
    """Make a span the current one for the rest of this task; what it sends to other services carries the span."""
    if span.get_span_context().is_valid:
        context.attach(trace.set_span_in_context(span))


def name_generation(generation_id: str) -> None:
    """Let the current span be found by the id that the answer's body bears."""
    span = trace.get_current_span()
    if span.is_recording():
        span.set_attribute(GENERATION_ID, generation_id)


def time_first_token(seconds: float) -> None:
    """Let traces be chosen by how long the client waited: a collector keeps those that were late."""
    span = trace.get_current_span()
    if span.is_recording():
        span.set_attribute(FIRST_TOKEN_MS, round(seconds * 1000))


def note(event: str, **attributes: str | int | float) -> None:
    """An event on the current span, if there is one."""
    span = trace.get_current_span()
    if span.is_recording():
        span.add_event(event, attributes)
