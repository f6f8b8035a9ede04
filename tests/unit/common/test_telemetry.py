from __future__ import annotations

import asyncio
import re
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from prometheus_client import CollectorRegistry, Counter, generate_latest

from services.common import metrics
from services.common.metrics import Totals, new_registry, serve_metrics
from services.common.ports import free_port
from services.common.tracing import current_metadata, remote_context, traceparent_of, tracing


@pytest.fixture
def port() -> int:
    return free_port()


def ask(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}") as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


async def get(port: int, path: str) -> tuple[int, str]:
    return await asyncio.to_thread(ask, port, path)


async def test_metrics_and_probes(port: int) -> None:
    registry, waits_for = CollectorRegistry(), ["its model"]
    Counter("ryzanstein_test_things", "Things", registry=registry).inc(3)
    with serve_metrics("127.0.0.1", port, registry, lambda: waits_for[0]):
        status, text = await get(port, "/metrics")
        assert (status, "ryzanstein_test_things_total 3.0" in text) == (200, True)
        assert await get(port, "/livez") == (200, "ok\n")
        assert await get(port, "/readyz") == (503, "its model\n")
        waits_for[0] = ""
        assert await get(port, "/readyz") == (200, "ok\n")
        assert (await get(port, "/other"))[0] == 404
        with (
            pytest.raises(OSError, match="in use"),
            serve_metrics("127.0.0.1", port, new_registry("test"), str),
        ):
            pass
    with pytest.raises(urllib.error.URLError, match="refused"):
        await get(port, "/livez")


def test_totals_are_read_at_scrape_time() -> None:
    registry, totals = new_registry("test"), {"good": 1, "bad": 0}
    Totals("ryzanstein_test_things", "Things", "result", lambda: totals, registry)
    totals["bad"] = 7
    text = generate_latest(registry).decode()
    assert "# TYPE ryzanstein_test_things_total counter" in text
    assert 'ryzanstein_test_things_total{result="bad"} 7.0' in text
    assert "process_resident_memory_bytes" in text


async def test_a_stuck_event_loop_is_not_alive(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "LIVENESS_TIMEOUT_S", 0.05)
    with serve_metrics("127.0.0.1", port, CollectorRegistry(), str), ThreadPoolExecutor() as threads:
        answer = threads.submit(ask, port, "/livez").result(60)  # the loop stands still until it has come
        assert answer == (503, "the event loop does not answer\n")


async def test_the_loops_longest_delay_is_told_once(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RYZANSTEIN_COMMIT", "abc123")
    registry = new_registry("test")

    def lag() -> float:
        value = registry.get_sample_value("ryzanstein_process_event_loop_lag_seconds")
        assert value is not None
        return value

    with serve_metrics("127.0.0.1", port, registry, str):
        await asyncio.sleep(0)
        time.sleep(1.0)  # noqa: ASYNC251  # that is the point
        await asyncio.sleep(0.05)
        first = lag()
        assert first > 0.8
        assert lag() < first
    text = generate_latest(registry).decode()
    assert re.search(r'ryzanstein_build_info{commit="abc123",python="3[^"]*",service="test",version="[^"]*"} 1.0', text)


async def test_port_zero_serves_no_metrics() -> None:
    with serve_metrics("256.256.256.256", 0, CollectorRegistry(), str):
        pass


def test_the_trace_context_travels_in_metadata() -> None:
    assert current_metadata() == ()
    assert traceparent_of(trace.INVALID_SPAN) == ""
    tracer = TracerProvider().get_tracer("test")
    with tracer.start_as_current_span("caller") as caller:
        metadata = (*current_metadata(), ("binary-bin", b"\xff"))
        assert dict(metadata)["traceparent"] == traceparent_of(caller)
    callee = tracer.start_span("callee", context=remote_context(metadata))
    assert callee.get_span_context().trace_id == caller.get_span_context().trace_id
    assert not trace.get_current_span(remote_context(None)).get_span_context().is_valid


def test_tracing_is_off_without_an_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", raising=False)
    before = trace.get_tracer_provider()
    with tracing("test") as on:
        assert not on
    assert trace.get_tracer_provider() is before
