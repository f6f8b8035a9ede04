"""Drafts in a worker's metrics and in the trace of a request."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pkgutil import iter_modules

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry, generate_latest
from ryzanstein.v1 import worker_pb2 as pb

from services.worker import drafting
from services.worker.api.metrics import EngineTotals
from services.worker.api.spans import RequestSpans
from services.worker.api.stream_buffer import StreamBuffer
from services.worker.engine.output import Finish, Output, Progress
from services.worker.engine.request import EngineRequest
from services.worker.engine.state import DRAFTERS
from tests.unit.worker.engine.stand_ins import idle_engine


async def test_drafts_are_counted_by_drafter_from_zero() -> None:
    engine, registry = await idle_engine(), CollectorRegistry()
    registry.register(EngineTotals([engine.counters], [engine.state]))
    engine.counters.proposed_tokens["grammar"] += 7
    engine.counters.accepted_tokens["grammar"] += 5
    lines = generate_latest(registry).decode().splitlines()
    for name, count in (("drafted", 7.0), ("accepted", 5.0)):
        for drafter in DRAFTERS:
            value = count if drafter == "grammar" else 0.0
            assert f'ryzanstein_worker_{name}_tokens_total{{drafter="{drafter}"}} {value}' in lines


def test_every_drafter_has_its_counts() -> None:
    modules = [import_module(f"{drafting.__name__}.{module.name}") for module in iter_modules(drafting.__path__)]
    kinds = [kind for module in modules for kind in vars(module).values() if isinstance(kind, type)]
    names = {kind.name for kind in kinds if isinstance(getattr(kind, "name", None), str)}
    assert names
    assert names <= set(DRAFTERS)


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    yield exporter
    provider.shutdown()


@pytest.mark.parametrize("drafts", [True, False])
def test_span_of_a_request_has_its_drafts(exporter: InMemorySpanExporter, *, drafts: bool) -> None:
    spans, request = RequestSpans(), EngineRequest("r", [1], pb.Sampling())
    buffer = StreamBuffer(spans, lambda _: None, lambda _: Progress(0, 0))
    spans.begin(request, "")
    buffer.add(request, Output(0, (4,)))
    buffer.add(request, Output(1, (5, 6, 7), proposed=4 if drafts else 0))
    buffer.add(request, Output(4, (8,), Finish.STOP, proposed=3 if drafts else 0))
    (span,) = exporter.get_finished_spans()
    attributes = dict(span.attributes or {})
    assert attributes["ryzanstein.generated_tokens"] == 5
    counts = (attributes.get("ryzanstein.drafted_tokens"), attributes.get("ryzanstein.accepted_tokens"))
    assert counts == ((7, 2) if drafts else (None, None))
