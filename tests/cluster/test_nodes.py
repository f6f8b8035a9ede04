"""A node is drained, loses its power, loses its cable, under load: no request fails, no byte changes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from tests.cluster.conftest import Disturb
from tests.cluster.installation import Installation
from tests.cluster.rig import Rig

pytestmark = pytest.mark.timeout(600)
# Nothing is heard of a node for so long before its pods count as lost.
LOST_S, BACK_S = 40.0, 180.0
LONGEST_PAUSE_S = 4.0


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


@pytest.mark.parametrize(("away", "back"), [(Rig.power_off, Rig.power_on), (Rig.unplug, Rig.plug_in)])
def test_a_node_loses_its_power_or_its_cable(
    disturbed: Disturb, rig: Rig, victim: str, away: Callable[[Rig, str], None], back: Callable[[Rig, str], None]
) -> None:
    def fault() -> None:
        away(rig, victim)
        time.sleep(LOST_S)
        back(rig, victim)

    load = disturbed(fault)
    assert load.figures()["pause_worst"] < LONGEST_PAUSE_S
