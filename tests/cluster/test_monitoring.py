"""The bundled Prometheus and Jaeger, as an operator opens them: by a port-forward."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.cluster.installation import Installation
from tests.cluster.load import Load, Traffic
from tests.unit.monitoring.panels import panels, shows

pytestmark = [pytest.mark.smoke, pytest.mark.timeout(240)]
COMPONENTS = {"gateway", "router", "coordinator", "worker"}
SERVICES = {f"ryzanstein-{name}" for name in ("gateway", "router", "kv-coordinator", "worker")}
# Those of Kubernetes, GPUs and autoscaling are off by default.
GROUPS = {
    f"ryzanstein-{name}"
    for name in (
        *("objectives", "workers", "load", "dependencies", "placement", "targets"),
        *("errors", "first-tokens", "levels"),
    )
}
DASHBOARDS_OF_OTHERS = {"rz-k8s"}
# Of what the load does not do: lose streams, wait, have limits, sessions, or blocks to pull from another worker.
EVENTS = {
    "rz-router: Time at Redis",
    "rz-router: What became of sessions",
    "rz-overview: Pauses that clients saw",
    "rz-gateway: Time at Redis",
    "rz-router: Wait in the queue",
    "rz-kv: Speed of a pull",
}


class Prometheus:
    """Behind a port-forward."""

    def __init__(self, url: str) -> None:
        self._url = url

    def ask(self, path: str, **parameters: str) -> Any:
        answer = httpx.get(f"{self._url}/api/v1/{path}", params=parameters, timeout=20).json()
        assert answer["status"] == "success", f"{path} {parameters}: {answer}"
        return answer["data"]

    def query(self, expr: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.ask("query", query=expr)["result"]
        return found


@pytest.fixture(scope="module")
def prometheus(installed: Installation) -> Iterator[Prometheus]:
    with installed.kube.forward(f"{installed.release}-prometheus", 9090) as url:
        yield Prometheus(url)


def test_every_pod_is_scraped(installed: Installation, prometheus: Prometheus) -> None:
    pods = {pod["metadata"]["name"] for component in COMPONENTS for pod in installed.pods(component)}

    def scraped() -> set[str]:
        return {series["metric"]["pod"] for series in prometheus.query('up{job="ryzanstein"} == 1')}

    installed.kube.until("every pod is scraped", lambda: pods <= scraped(), timeout_s=60, every_s=1)


def test_every_panel_shows_something_and_every_rule_is_evaluated(
    installed: Installation, traffic: Traffic, prometheus: Prometheus
) -> None:
    with Load(traffic):
        time.sleep(75)  # rates want several scrapes
        groups = prometheus.ask("rules")["groups"]
        assert {group["name"] for group in groups} == GROUPS
        evaluated = [rule for group in groups for rule in group["rules"]]
        assert [rule["name"] for rule in evaluated if rule["health"] == "err"] == []
        empty = {title for title, panel in panels(DASHBOARDS_OF_OTHERS) if not shows(panel, prometheus.query, "1m")}
    assert empty <= EVENTS


def test_a_trace_of_all_four_services(installed: Installation) -> None:
    """By the id that the client got. After a load routers may do without the coordinator for a while."""
    body = {"model": "ryzanstein-tiny", "prompt": "def fibonacci(n):\n" * 8, "max_tokens": 8}
    traces: list[str] = []
    with installed.kube.forward(f"{installed.release}-jaeger", 16686) as url:

        def services(trace_id: str) -> set[str]:
            found = httpx.get(f"{url}/api/traces/{trace_id}", timeout=10).json().get("data") or [{}]
            return {process["serviceName"] for process in found[0].get("processes", {}).values()}

        def traced() -> bool:
            traces.append(os.urandom(16).hex())
            headers = {"traceparent": f"00-{traces[-1]}-{os.urandom(8).hex()}-01"}
            answer = httpx.post(f"{installed.url}/v1/completions", json=body, headers=headers, timeout=60)
            assert answer.headers["x-trace-id"] == traces[-1]
            return any(services(trace) >= SERVICES for trace in traces)

        installed.kube.until("spans of all services", traced, every_s=2)
