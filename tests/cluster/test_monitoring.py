"""The bundled Prometheus and Jaeger, as an operator opens them: by a port-forward."""

from __future__ import annotations

import os
import re
import subprocess
import time

import httpx
import pytest

from tests.cluster.installation import Installation
from tests.cluster.load import ClusterLoad, Traffic
from tests.cluster.prometheus import Prometheus
from tests.programs import CHART, search_path
from tests.unit.monitoring.panels import EVENTS, panels, shows

GUIDE = CHART.parents[1] / "docs" / "operations.md"
# Whoever types the second command has seen the first one's answer.
SEEN = "&\ntrap 'kill $!' EXIT\nuntil curl -so /dev/null 127.0.0.1:16686; do sleep 0.2; done\n"
COMPONENTS = {"gateway", "router", "coordinator", "worker"}
# Those of Kubernetes, GPUs and autoscaling are off by default.
GROUPS = {
    f"ryzanstein-{name}"
    for name in (
        *("objectives", "workers", "load", "dependencies", "placement", "targets"),
        *("errors", "first-tokens", "levels"),
    )
}
DASHBOARDS_OF_OTHERS = {"rz-k8s"}
# Its load has no sessions.
OF_SESSIONS = {"rz-router: Time at Redis", "rz-router: What became of sessions"}


@pytest.mark.smoke
def test_every_pod_is_scraped(installed: Installation, prometheus: Prometheus) -> None:
    pods = {pod["metadata"]["name"] for component in COMPONENTS for pod in installed.pods(component)}

    def scraped() -> set[str]:
        return {series["metric"]["pod"] for series in prometheus.query('up{job="ryzanstein"} == 1')}

    installed.kube.until("every pod is scraped", lambda: pods <= scraped(), timeout_s=60, every_s=1)


@pytest.mark.smoke
def test_every_panel_shows_data_and_every_rule_is_evaluated(
    installed: Installation, traffic: Traffic, prometheus: Prometheus
) -> None:
    with ClusterLoad(traffic):
        time.sleep(75)  # rates want several scrapes
        groups = prometheus.ask("rules")["groups"]
        assert {group["name"] for group in groups} == GROUPS
        evaluated = [rule for group in groups for rule in group["rules"]]
        assert [rule["name"] for rule in evaluated if rule["health"] == "err"] == []
        empty = {title for title, panel in panels(DASHBOARDS_OF_OTHERS) if not shows(panel, prometheus.query, "1m")}
    assert empty <= EVENTS | OF_SESSIONS


def test_the_way_from_a_slow_request_to_its_trace(installed: Installation) -> None:
    """The guide's own commands, as they stand there."""
    section = GUIDE.read_text().partition("\n## Why is it slow\n")[2].partition("\n## ")[0]
    (trace,) = re.findall(r"```sh\n(.*?)```", section, re.DOTALL)
    request_id = f"slow-{os.getpid()}"
    headers = {"x-request-id": request_id, "traceparent": f"00-{os.urandom(16).hex()}-{os.urandom(8).hex()}-01"}
    body = {"model": "ryzanstein-tiny", "prompt": "def fibonacci(n):\n" * 8, "max_tokens": 8}
    answer = httpx.post(f"{installed.url}/v1/completions", json=body, headers=headers, timeout=60)
    assert answer.headers["x-request-id"] == request_id

    def typed(text: str) -> str:
        names = {"NAMESPACE": installed.kube.namespace, "RELEASE": installed.release, "REQUEST_ID": request_id}
        for name, value in names.items():
            text = text.replace(name, value)
        environment = {**os.environ, "PATH": search_path(), "KUBECONFIG": str(installed.kube.kubeconfig)}
        command = ["bash", "-c", text]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
        return done.stdout

    installed.kube.until(
        "the trace", lambda: "worker.decode" in (shown := typed(trace.replace("&\n", SEEN))) and " ms in " in shown
    )
