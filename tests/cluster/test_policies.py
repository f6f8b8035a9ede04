"""Reachability of every port of every pod, from the release's own pods, from its namespace, and from another one."""

from __future__ import annotations

import json

import pytest

from tests.charts.network import CALLS, COORDINATOR, GRPC, HTTP, METRICS, REDIS, ROUTER, WORKER
from tests.cluster.conftest import SHARED, Namespaces, settings
from tests.cluster.installation import Installation
from tests.cluster.kube import Kube

pytestmark = pytest.mark.smoke
PORTS = {
    "gateway": (HTTP, GRPC, METRICS),
    "router": (ROUTER, METRICS),
    "coordinator": (COORDINATOR, METRICS),
    "worker": (WORKER, METRICS),
    "redis": (REDIS,),
}
SOURCES = ("gateway", "router", "coordinator", "worker")
EVERYTHING = {(component, port) for component, ports in PORTS.items() for port in ports}
PUBLIC = {("gateway", HTTP), ("gateway", GRPC)}
# Tries all at once: what is refused is dropped, and costs the whole patience.
KNOCK = """
import asyncio, json, sys
async def knock(component, host, port):
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(host, port), 3)
    except (OSError, TimeoutError):
        return None
    writer.close()
    return [component, port]
async def main():
    print(json.dumps([one for one in await asyncio.gather(*(knock(*door) for door in json.loads(sys.argv[1]))) if one]))
asyncio.run(main())
"""


def doors(installed: Installation, without: str = "") -> str:
    """Every port of one pod of each component, another one than the named."""
    pods = {
        component: next(pod for pod in installed.pods(component) if pod["metadata"]["name"] != without)
        for component in PORTS
        if not (component == "coordinator" and without.startswith(f"{installed.release}-coordinator"))
    }
    return json.dumps([[c, pod["status"]["podIP"], port] for c, pod in pods.items() for port in PORTS[c]])


def opened(output: str) -> set[tuple[str, int]]:
    return {(component, port) for component, port in json.loads(output)}


def reached_from(kube: Kube, installed: Installation) -> set[tuple[str, int]]:
    """By a pod that is not of the release."""
    return opened(kube.run("stranger", "cli", "python", "-c", KNOCK, doors(installed)))


@pytest.mark.parametrize("source", SOURCES)
def test_services_reach_only_their_callees(installed: Installation, source: str) -> None:
    pod = installed.pod(source)["metadata"]["name"]
    reached = opened(installed.kube.exec(pod, "python", "-c", KNOCK, doors(installed, without=pod)))
    # Enforcers that keep both directions of a policy in one chain let gateways through to what is public of each other.
    reached -= {(component, port) for component, port in PUBLIC if component == source}
    assert reached == {(edge.target, edge.port) for edge in CALLS if edge.source == source}


def test_strangers_reach_the_public_ports_only(installed: Installation, namespaces: Namespaces) -> None:
    """And everything, once policies are off: what refused them was the policies."""
    foreign = namespaces("foreign")
    for kube in (installed.kube, foreign):
        assert reached_from(kube, installed) == PUBLIC
    installed.install(*settings({**SHARED, "networkPolicy.enabled": "false"}))
    try:
        foreign.until("everything is open", lambda: reached_from(foreign, installed) == EVERYTHING, timeout_s=30)
    finally:
        installed.install(*settings(SHARED))
    foreign.until("everything is closed again", lambda: reached_from(foreign, installed) == PUBLIC, timeout_s=30)
