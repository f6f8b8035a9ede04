"""Pods, ranks and processes are lost in mid-stream: no request fails, no byte changes."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator

import pytest

from tests.cluster.conftest import Namespaces
from tests.cluster.installation import Installation
from tests.cluster.load import Load, Traffic
from tests.cluster.rig import Rig

pytestmark = pytest.mark.timeout(300)
Disturb = Callable[[Callable[[], None]], Load]
Restarts = Callable[[], dict[str, int]]
LONGEST_PAUSE_S = 4.0
SETTLE_S = 5.0
REPLICAS = {"workers.pools.default.replicas": 3, "gateway.replicas": 2, "router.replicas": 2}


@pytest.fixture(scope="module")
def installed(namespaces: Namespaces) -> Installation:
    installation = Installation(namespaces("faults"))
    installation.install(*(arg for name, value in REPLICAS.items() for arg in ("--set", f"{name}={value}")))
    return installation


@pytest.fixture(scope="module")
def traffic(installed: Installation) -> Traffic:
    return Traffic.undisturbed(installed.url)


@pytest.fixture
def restarts(installed: Installation) -> Iterator[Restarts]:
    """Which containers were restarted since the test began."""
    before = installed.kube.restarts()

    def since() -> dict[str, int]:
        return {n: c - before.get(n, 0) for n, c in installed.kube.restarts().items() if c > before.get(n, 0)}

    return since


@pytest.fixture
def disturbed(
    installed: Installation, traffic: Traffic, figures: dict[str, object], request: pytest.FixtureRequest
) -> Disturb:
    """The load with a fault in its middle; everything is ready again at the end, and nobody was harmed."""

    def run(fault: Callable[[], None]) -> Load:
        with Load(traffic) as load:
            fault()
            time.sleep(SETTLE_S)
            installed.wait_ready()
        figures[request.node.name] = load.figures()
        load.assert_unharmed()
        return load

    return run


@pytest.mark.smoke
def test_a_worker_pod_deleted_with_force(installed: Installation, disturbed: Disturb) -> None:
    disturbed(lambda: installed.delete(installed.pod("worker"), force=True))


@pytest.mark.smoke
def test_a_rank_killed(installed: Installation, disturbed: Disturb, rig: Rig, restarts: Restarts) -> None:
    victim = installed.pod("worker")
    disturbed(lambda: rig.signal(victim, "services.worker.ranks", signal.SIGKILL))
    assert not restarts(), "the worker starts its ranks anew by itself"


def test_a_worker_pod_deleted_gracefully(installed: Installation, disturbed: Disturb) -> None:
    disturbed(lambda: installed.delete(installed.pod("worker")))


@pytest.mark.parametrize("component", ["gateway", "router", "coordinator", "workers", "redis"])
def test_a_rollout(installed: Installation, disturbed: Disturb, component: str, restarts: Restarts) -> None:
    disturbed(lambda: installed.restart(component))
    assert not restarts()


@pytest.mark.parametrize("component", ["redis", "router", "coordinator"])
def test_a_control_service_killed_with_force(installed: Installation, disturbed: Disturb, component: str) -> None:
    disturbed(lambda: installed.delete(*installed.pods(component), force=True))


@pytest.mark.parametrize(("component", "module"), [("worker", "services.worker.server"), ("router", "services.router")])
def test_a_frozen_process(
    installed: Installation, disturbed: Disturb, rig: Rig, component: str, module: str, restarts: Restarts
) -> None:
    victim = installed.pod(component)
    load = disturbed(lambda: rig.signal(victim, module, signal.SIGSTOP))
    installed.kube.until("the kubelet has replaced the frozen container", lambda: bool(restarts()), timeout_s=90)
    installed.wait_ready()
    assert load.figures()["pause_worst"] < LONGEST_PAUSE_S
