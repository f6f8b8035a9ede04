"""A node is drained, loses its power, loses its cable, under load: no request fails, no byte changes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import httpx
import pytest

from tests.cluster.conftest import Disturb, Namespaces, settings
from tests.cluster.installation import Installation
from tests.cluster.rig import Rig

pytestmark = pytest.mark.timeout(600)
# Nothing is heard of a node for so long before its pods count as lost.
LOST_S, BACK_S = 40.0, 180.0
LONGEST_PAUSE_S = 4.0
# Ranks that only wait, so that two nodes of one machine do not share what limits a worker: 4 requests, 35 ms a step.
PACED = {
    "RYZANSTEIN_ENGINE": "simulated",
    "RYZANSTEIN_ENGINE_ARGS": '{"speed": 0.2}',
    "RYZANSTEIN_MAX_RUNNING": "4",
}


@pytest.fixture(scope="module")
def nodes(installed: Installation) -> list[str]:
    names = [node["metadata"]["name"] for node in installed.kube.items("nodes")]
    if len(names) < 2:
        pytest.skip("needs two nodes")
    return names


@pytest.fixture
def victim(installed: Installation, nodes: list[str]) -> Iterator[str]:
    """The last node: workers and routers are on it, gateways are not.

    Clients' connections end where a gateway ends: what is shown here is the loss of everything behind it.
    """
    pinned = {"kubernetes.io/hostname": nodes[0]}
    place(installed, "gateway", pinned)
    spread(installed)
    for component in ("router", "worker"):
        assert nodes[-1] in {pod["spec"]["nodeName"] for pod in installed.pods(component)}, f"no {component} there"
    yield nodes[-1]
    installed.kube.until("all nodes are ready", lambda: ready(installed) == len(nodes), timeout_s=BACK_S)
    place(installed, "gateway", None)


def ready(installed: Installation) -> int:
    conditions = [c for node in installed.kube.items("nodes") for c in node["status"]["conditions"]]
    return sum(condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions)


def place(installed: Installation, component: str, where: dict[str, str] | None) -> None:
    installed.patch(component, {"spec": {"template": {"spec": {"nodeSelector": where}}}})
    installed.wait_ready(BACK_S)


def spread(installed: Installation) -> None:
    """Over the nodes again: pods stay where a drain has put them."""
    for component in ("router", "workers"):
        installed.restart(component)
    installed.wait_ready(BACK_S)


def test_a_drained_node(installed: Installation, disturbed: Disturb, nodes: list[str]) -> None:
    """Gateways included: they finish what they have, and budgets keep the last of each component."""
    arguments = ("--ignore-daemonsets", "--delete-emptydir-data", "--timeout=170s")
    try:
        disturbed(lambda: installed.kube.kubectl("drain", nodes[-1], *arguments, timeout_s=180))
    finally:
        installed.kube.kubectl("uncordon", *nodes)


def test_power_is_lost(installed: Installation, disturbed: Disturb, rig: Rig, victim: str) -> None:
    def fault() -> None:
        rig.power_off(victim)
        time.sleep(LOST_S)
        rig.power_on(victim)

    load = disturbed(fault)
    assert load.figures()["pause_worst"] < LONGEST_PAUSE_S


def test_a_cable_is_pulled(installed: Installation, disturbed: Disturb, rig: Rig, victim: str) -> None:
    def fault() -> None:
        rig.unplug(victim)
        time.sleep(LOST_S)
        rig.plug_in(victim)

    load = disturbed(fault)
    assert load.figures()["pause_worst"] < LONGEST_PAUSE_S


def test_a_second_node_nearly_doubles_the_throughput(
    namespaces: Namespaces, nodes: list[str], figures: dict[str, object]
) -> None:
    """The same load on one replica, then on two, one on each node."""
    installation = Installation(namespaces("paced"))
    small = settings({"workers.defaults.resources.requests.cpu": "50m", "gateway.resources.requests.cpu": "20m"})
    installation.install(*small)
    env = [{"name": name, "value": value} for name, value in PACED.items()]
    installation.patch("worker", {"spec": {"template": {"spec": {"containers": [{"name": "worker", "env": env}]}}}})
    installation.wait_ready()
    rates = [asyncio.run(tokens_per_second(installation.url, "one"))]
    installation.install(*small, "--set=workers.defaults.replicas=2")
    assert {pod["spec"]["nodeName"] for pod in installation.pods("worker")} == set(nodes)
    rates.append(asyncio.run(tokens_per_second(installation.url, "two")))
    figures["tokens/s of one and two nodes"] = [round(rate) for rate in rates]
    assert rates[1] >= 1.8 * rates[0]


async def tokens_per_second(url: str, name: str) -> float:
    """Of 64 requests of 16 clients, half a minute for one paced worker."""
    limit = asyncio.Semaphore(16)
    async with httpx.AsyncClient(timeout=120) as client:

        async def complete(number: int) -> int:
            body = {"model": "ryzanstein-tiny", "prompt": f"{name} {number}: ", "max_tokens": 48, "temperature": 0}
            async with limit:
                answer = (await client.post(f"{url}/v1/completions", json=body)).raise_for_status().json()
            tokens: int = answer["usage"]["completion_tokens"]
            return tokens

        began = time.perf_counter()
        tokens = sum(await asyncio.gather(*map(complete, range(64))))
        return tokens / (time.perf_counter() - began)
