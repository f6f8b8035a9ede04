"""The optional parts of monitoring: which traces a collector keeps, where logs go, and how one leads to the other."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.trace import NonRecordingSpan, SpanContext, StatusCode, TraceFlags, set_span_in_context, use_span

from services.common.logs import JsonFormatter
from services.common.ports import free_port
from services.gateway.spans import FIRST_TOKEN_MS
from tests.charts.network import Edge, edges, rules
from tests.charts.rendering import Object, Rendered, RenderError, environment, render
from tests.otlp import Collector, collecting
from tests.programs import answers, program

SERVICES = ("gateway", "router", "coordinator", "worker")
COLLECTOR = "monitoring: {collector: {enabled: true, waitSeconds: 1}}\ntracing: {ratio: 0}"
OTLP = "monitoring: {collector: {enabled: true}}\ntracing: {mode: otlp, endpoint: 'https://collector.example:4317'}"
LOGS = "monitoring: {loki: {enabled: true}}"
# Traces that have to come through, last: all earlier ones have been judged by then.
LAST = "last"


@dataclass(frozen=True)
class Running:
    """A collector with the chart's configuration, and what it let through."""

    collector: Collector
    provider: TracerProvider

    def trace(self, name: str, *, fails: bool = False, first_token_ms: int = 0, of_a_client: bool = False) -> str:
        """Send a trace of one span; its id."""
        trace_id, span_id = int.from_bytes(name.encode().ljust(16, b".")), 1
        parent = NonRecordingSpan(SpanContext(trace_id, span_id, is_remote=True, trace_flags=TraceFlags(1)))
        context = set_span_in_context(parent) if of_a_client else None
        span = self.provider.get_tracer("test").start_span(name, context=context)
        if first_token_ms:
            span.set_attribute(FIRST_TOKEN_MS, first_token_ms)
        if fails:
            span.set_status(StatusCode.ERROR)
        with use_span(span, end_on_exit=True):
            return f"{span.get_span_context().trace_id:032x}"


@contextmanager
def _running(config: Object, folder: Path) -> Iterator[int]:
    """The port of the program that the chart names, with this configuration on ports of this machine."""
    port, health = free_port(), free_port()
    text = yaml.safe_dump(config).replace(":4317", f":{port}", 1).replace(":13133", f":{health}")
    (folder / "config.yaml").write_text(text.replace("0.0.0.0", "127.0.0.1"))
    command = [program("jaeger"), "--config", str(folder / "config.yaml")]
    with (folder / "log").open("w") as log, subprocess.Popen(command, stdout=log, stderr=log) as collector:
        try:
            deadline = time.monotonic() + 180
            while not answers(f"http://127.0.0.1:{health}/status"):
                assert collector.poll() is None, (folder / "log").read_text()
                assert time.monotonic() < deadline, "the collector"
                time.sleep(0.1)
            yield port
        finally:
            collector.terminate()


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    with collecting() as (collector, variables):
        config = _config(render(inline=COLLECTOR))
        config["exporters"]["otlp"]["endpoint"] = variables["OTEL_EXPORTER_OTLP_ENDPOINT"]
        with _running(config, tmp_path) as port:
            provider = TracerProvider(resource=Resource({SERVICE_NAME: "ryzanstein-gateway"}))
            provider.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter(f"http://127.0.0.1:{port}")))
            yield Running(collector, provider)
            provider.shutdown()


def _config(rendered: Rendered) -> Object:
    data = rendered.named("ConfigMap", "ryzanstein-collector")["data"]
    config: Object = yaml.safe_load(data["config.yaml"])
    return config


def test_a_collector_keeps_failed_late_and_requested_traces(running: Running) -> None:
    dropped = {running.trace("quick"), running.trace("in time", first_token_ms=2500)}
    sampled = {
        running.trace("failed", fails=True),
        running.trace("late", first_token_ms=2501),
        running.trace("asked for", of_a_client=True),
    }
    time.sleep(2)  # longer than it waits for the spans of a trace
    last = running.trace(LAST, fails=True)
    running.collector.wait(last, {LAST})
    assert all(running.collector.trace(trace) for trace in sampled)
    assert not any(running.collector.trace(trace) for trace in dropped)


def test_with_a_collector_services_record_and_send_all_traces() -> None:
    for pod in render(inline=COLLECTOR).pods_of(*SERVICES):
        env = environment(pod.containers[0])
        assert env["OTEL_EXPORTER_OTLP_ENDPOINT"] == "http://ryzanstein-collector.serving.svc.cluster.local:4317"
        assert env["OTEL_TRACES_SAMPLER_ARG"] == "1"


def test_a_collector_stands_between() -> None:
    """It alone reaches what keeps traces: the Jaeger here, or the one that tracing.endpoint names."""
    present = {edge for edge in edges(render(inline=COLLECTOR)) if {edge.source, edge.target} & {"collector", "jaeger"}}
    assert present == {
        *(Edge(service, "collector", 4317) for service in SERVICES),
        Edge("collector", "jaeger", 4317),
        Edge("grafana", "jaeger", 16686),
    }
    rendered = render(inline=OTLP)
    policies = rendered.of("NetworkPolicy")
    exporter = _config(rendered)["exporters"]["otlp"]
    assert exporter == {"endpoint": "https://collector.example:4317", "tls": {"insecure": False}}
    leave = {
        pod.component
        for pod in rendered.pods
        if {"ports": [{"protocol": "TCP", "port": 4317}]} in rules(policies, pod, "egress")
    }
    assert leave == {"collector"}
    with pytest.raises(RenderError, match=r"monitoring\.collector\.enabled: there are no traces"):
        render(inline="monitoring: {collector: {enabled: true}}\ntracing: {mode: none}")


def test_a_collectors_configuration_can_be_added_to() -> None:
    own = _config(render(inline=OTLP))
    more = _config(
        render(inline=OTLP.replace("true}}", "true, config: {exporters: {otlp: {headers: {x-tenant: a}}}}}}"))
    )
    assert more["exporters"]["otlp"] == {**own["exporters"]["otlp"], "headers": {"x-tenant": "a"}}
    assert {key: value for key, value in more.items() if key != "exporters"} == {
        key: value for key, value in own.items() if key != "exporters"
    }


def test_logs_are_off_by_default_and_can_come_from_elsewhere() -> None:
    parts = {"loki", "alloy", "collector"}
    assert not parts & {pod.component for pod in render().pods}
    assert {pod.component for pod in render(inline=LOGS).pods} >= {"loki", "alloy"}
    alone = render(inline="monitoring: {loki: {enabled: true, alloy: {enabled: false}}}")
    assert not alone.pods_of("alloy")
    assert not [role for role in alone.of("Role") if role["metadata"]["name"].endswith("-alloy")]


def test_a_log_reader_may_read_logs_and_write_to_loki() -> None:
    rendered = render(inline=LOGS)
    role = rendered.named("Role", "ryzanstein-alloy")
    assert {(tuple(rule["resources"]), tuple(rule["verbs"])) for rule in role["rules"]} == {
        (("pods",), ("get", "list", "watch")),
        (("pods/log",), ("get",)),
    }
    present = {edge for edge in edges(rendered) if {edge.source, edge.target} & {"loki", "alloy"}}
    assert present == {Edge("alloy", "loki", 3100), Edge("grafana", "loki", 3100)}


def test_logs_have_the_labels_of_metrics() -> None:
    text = render(inline=LOGS).named("ConfigMap", "ryzanstein-alloy")["data"]["config.alloy"]
    prometheus = yaml.safe_load(render().named("ConfigMap", "ryzanstein-prometheus")["data"]["prometheus.yml"])
    (job,) = prometheus["scrape_configs"]
    of_metrics = {
        (step["source_labels"][0], step["target_label"]) for step in job["relabel_configs"] if "target_label" in step
    }
    rule = r'source_labels = \["(\w+)"\]\s+target_label\s+= "(\w+)"'
    of_logs = set(re.findall(rule, text))
    assert of_metrics - of_logs == {("__meta_kubernetes_pod_name", "instance")}, "which is the pod"
    assert of_logs - of_metrics == {("__meta_kubernetes_pod_container_name", "container")}
    (selector,) = (each["selectors"][0]["label"] for each in job["kubernetes_sd_configs"])
    assert f'label = "{selector}"' in text


def test_a_line_leads_to_its_trace_and_a_span_to_its_lines() -> None:
    sources = _sources(render(inline=LOGS))
    (field,) = sources["Loki"]["jsonData"]["derivedFields"]
    trace_id = 0x5B8EFFF798038103D269B633813FC60C
    span = NonRecordingSpan(SpanContext(trace_id, 1, is_remote=False, trace_flags=TraceFlags(1)))
    with use_span(span):
        line = JsonFormatter("gateway").format(logging.makeLogRecord({"msg": "request interrupted"}))
    (extracted,) = re.findall(field["matcherRegex"], line)
    assert extracted == json.loads(line)["trace_id"] == f"{trace_id:032x}"
    assert field["datasourceUid"] == sources["Jaeger"]["uid"]
    to_logs = sources["Jaeger"]["jsonData"]["tracesToLogsV2"]
    assert to_logs["datasourceUid"] == sources["Loki"]["uid"]
    assert to_logs["query"].startswith('{namespace="serving", release="ryzanstein"}')


def test_only_installed_sources_are_linked() -> None:
    assert "jsonData" not in _sources(render())["Jaeger"]
    alone = _sources(render(inline=f"{LOGS}\ntracing: {{mode: none}}"))
    assert "jsonData" not in alone["Loki"]
    assert "Jaeger" not in alone


def _sources(rendered: Rendered) -> dict[str, dict[str, Any]]:
    """Grafana's data sources by name."""
    data = rendered.named("ConfigMap", "ryzanstein-grafana")["data"]
    return {source["name"]: source for source in yaml.safe_load(data["sources.yaml"])["datasources"]}
