"""Upgrades after a field of the chart was changed by hand, and the way out."""

from __future__ import annotations

import pytest

from tests.cluster.control_plane.releases import install, replicas, upgrade
from tests.cluster.kube import Kube, KubeCommandError

GATEWAY = "deployment/ryzanstein-gateway"
BY_HAND = "gateway.replicasManaged=false"


def _scale(kube: Kube, count: int) -> None:
    kube.kubectl("scale", GATEWAY, f"--replicas={count}")


@pytest.mark.parametrize("recovery", ["--force-conflicts", "--server-side=false"])
def test_helm_4_refuses_until_told(namespace: Kube, recovery: str) -> None:
    install(namespace, "gateway.replicas=2", major=4)
    _scale(namespace, 3)
    with pytest.raises(KubeCommandError, match=r"conflict[\s\S]*\.spec\.replicas"):
        upgrade(namespace, "gateway.replicas=4", major=4)
    assert replicas(namespace, GATEWAY) == 3
    upgrade(namespace, "gateway.replicas=4", major=4, args=(recovery,))
    assert replicas(namespace, GATEWAY) == 4


@pytest.mark.parametrize("major", [3, 4])
def test_upgrade_keeps_externally_managed_replicas(namespace: Kube, major: int) -> None:
    install(namespace, BY_HAND, major=major)
    _scale(namespace, 3)
    upgrade(namespace, BY_HAND, "logLevel=debug", major=major)
    assert replicas(namespace, GATEWAY) == 3
