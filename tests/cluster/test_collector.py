"""The optional collector in front of the bundled Jaeger: what is worth keeping arrives, the rest does not."""

from __future__ import annotations

import os

import httpx
import pytest

from tests.cluster.conftest import Namespaces, settings
from tests.cluster.installation import Installation

pytestmark = pytest.mark.timeout(300)
VALUES = {
    "workers.defaults.resources.requests.cpu": "50m",
    "tracing.ratio": 0,
    "monitoring.collector.enabled": "true",
    "monitoring.collector.waitSeconds": 1,
    "monitoring.collector.lateSeconds": 60,  # nothing is late by itself, however crowded the machine is
}
SERVICES = {f"ryzanstein-{name}" for name in ("gateway", "router", "kv-coordinator", "worker")}


@pytest.fixture(scope="module")
def collecting(namespaces: Namespaces) -> Installation:
    installation = Installation(namespaces("collecting"))
    installation.install(*settings(VALUES))
    return installation


def ask(installation: Installation, *, sampled: bool) -> str:
    """A request of a client that has a trace of its own; the trace's id."""
    trace = os.urandom(16).hex()
    headers = {"traceparent": f"00-{trace}-{os.urandom(8).hex()}-0{int(sampled)}"}
    body = {"model": "ryzanstein-tiny", "prompt": "def fibonacci(n):\n" * 8, "max_tokens": 8}
    httpx.post(f"{installation.url}/v1/completions", json=body, headers=headers, timeout=60).raise_for_status()
    return trace


def test_only_client_sampled_traces_arrive_complete(collecting: Installation) -> None:
    """Those that nobody asked for were sent first: they have been judged by then."""
    unwanted, wanted = [ask(collecting, sampled=False) for _ in range(3)], ask(collecting, sampled=True)
    with collecting.kube.forward(f"{collecting.release}-jaeger", 16686) as url:

        def services(trace: str) -> set[str]:
            found = httpx.get(f"{url}/api/traces/{trace}", timeout=10).json().get("data") or [{}]
            return {process["serviceName"] for process in found[0].get("processes", {}).values()}

        collecting.kube.until("the trace", lambda: services(wanted) >= SERVICES, timeout_s=90, every_s=2)
        assert [services(trace) for trace in unwanted] == [set(), set(), set()]
