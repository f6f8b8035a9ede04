"""Pods, ranks and processes are lost in mid-stream: no request fails, no byte changes."""

from __future__ import annotations

import signal

import pytest

from tests.cluster.conftest import Disturb, Restarts
from tests.cluster.installation import Installation
from tests.cluster.rig import Rig

# Longest pause after the loss of a silent peer.
LONGEST_PAUSE_S = 4.0


@pytest.mark.smoke
def test_a_worker_pod_deleted_with_force(installed: Installation, disturbed: Disturb) -> None:
    disturbed(lambda: installed.delete(installed.pod("worker"), force=True))


@pytest.mark.smoke
def test_a_rank_killed(installed: Installation, disturbed: Disturb, rig: Rig, restarts: Restarts) -> None:
    victim = installed.pod("worker")
    disturbed(lambda: rig.signal(victim, "services.worker.rank", signal.SIGKILL))
    assert not restarts(), "the worker starts its ranks anew by itself"


def test_a_worker_pod_deleted_gracefully(installed: Installation, disturbed: Disturb) -> None:
    disturbed(lambda: installed.delete(installed.pod("worker")))


@pytest.mark.parametrize("component", ["redis", "router", "coordinator"])
def test_a_control_service_killed_with_force(installed: Installation, disturbed: Disturb, component: str) -> None:
    disturbed(lambda: installed.delete(*installed.pods(component), force=True))


@pytest.mark.parametrize(
    ("component", "module"),
    [("worker", "services.worker"), ("router", "services.router")],
    ids=["worker", "router"],
)
def test_a_frozen_process(
    installed: Installation, disturbed: Disturb, rig: Rig, component: str, module: str, restarts: Restarts
) -> None:
    """A process that is there and does nothing: its requests go on elsewhere, and the kubelet replaces it."""
    victim = installed.pod(component)["metadata"]["name"]

    def replaced() -> bool:
        return any(name.startswith(f"{victim}/") for name in restarts())

    def freeze() -> None:
        rig.signal(installed.kube.get("pod", victim), module, signal.SIGSTOP)
        installed.kube.until("the frozen container is replaced", replaced, timeout_s=120)

    load = disturbed(freeze)
    assert load.figures()["pause_worst"] < LONGEST_PAUSE_S
