"""One span per request, between the caller's and the worker's W3C trace context."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from opentelemetry import context, trace
from opentelemetry.trace import INVALID_SPAN, Span

from services.common.telemetry_names import AttributeValue, gen_ai_attributes
from services.common.tracing import remote_context

REQUEST_ID = "ryzanstein.request_id"  # the answer's x-request-id
GENERATION_ID = "ryzanstein.generation_id"  # the `id` in the answer's body
FIRST_TOKEN_MS = "ryzanstein.first_token_ms"  # since the request's arrival; of the last sequence to begin


class RequestTracer:
    """Starts and ends spans; with tracing off, it only forwards the caller's context."""

    def __init__(self, *, enabled: bool, gen_ai: bool = False) -> None:
        """`gen_ai`: spans also have OpenTelemetry's attributes of generative AI."""
        self._enabled, self._gen_ai = enabled, gen_ai
        self._tracer = trace.get_tracer("ryzanstein.gateway")

    def begin(self, name: str, traceparent: str) -> Span:
        """Begin a request's span, which the caller ends; an empty or invalid `traceparent` is ignored."""
        if not self._enabled and not traceparent:
            return INVALID_SPAN
        caller = remote_context((("traceparent", traceparent),))
        if not self._enabled:
            return trace.get_current_span(caller)
        return self._tracer.start_span(name, context=caller, kind=trace.SpanKind.SERVER)

    def end(self, span: Span, route: str, attributes: Mapping[str, AttributeValue]) -> None:
        """End a recording span, with its last attributes."""
        span.set_attributes(attributes)
        ours: Mapping[str, AttributeValue] | None = getattr(span, "attributes", None)  # the SDK's spans have them
        if self._gen_ai and ours is not None:
            span.set_attributes(gen_ai_attributes(route, ours))
        span.end()


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


def describe(attributes: Callable[[], Mapping[str, AttributeValue]]) -> None:
    """Store attributes on the current span, each with the prefix `ryzanstein.`; called only if there is one."""
    span = trace.get_current_span()
    if span.is_recording():
        span.set_attributes({f"ryzanstein.{name}": value for name, value in attributes().items()})


def note(event: str, **attributes: str | int | float) -> None:
    """Add an event to the current span, if there is one."""
    span = trace.get_current_span()
    if span.is_recording():
        span.add_event(event, attributes)
