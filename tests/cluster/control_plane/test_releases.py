"""Install, upgrade, roll back and uninstall with Helm 3, with Helm 4, and from one to the other."""

from __future__ import annotations

import pytest

from tests.cluster.control_plane.releases import install, owned, replicas, specs, upgrade
from tests.cluster.kube import Kube

GATEWAY, ROUTER, WORKERS = (
    "deployment/ryzanstein-gateway",
    "statefulset/ryzanstein-router",
    "statefulset/ryzanstein-workers-default",
)
CHANGES = (
    "gateway.replicas=2",
    "router.replicas=2",
    "workers.pools.default.replicas=2",
    "logLevel=debug",
    "commonLabels.team=blue",
)
CLAIMS = "redis.persistence.enabled=true"


@pytest.mark.parametrize(("first", "then"), [(3, 3), (4, 4), (3, 4)])
def test_a_release_goes_through_its_life(namespace: Kube, first: int, then: int) -> None:
    install(namespace, major=first)
    before, generations = specs(namespace), _generations(namespace)
    upgrade(namespace, major=first)
    assert _generations(namespace) == generations, "the same values again would replace pods"
    upgrade(namespace, *CHANGES, major=then)
    assert [replicas(namespace, workload) for workload in (GATEWAY, ROUTER, WORKERS)] == [2, 2, 2]
    namespace.helm("rollback", "ryzanstein", "1", major=then)
    assert specs(namespace) == before
    namespace.helm("uninstall", "ryzanstein", major=then)
    assert owned(namespace) == {}


def _generations(kube: Kube) -> dict[str, int]:
    """Counts the changes of each object's spec, where it has one."""
    found = kube.items("deployments,statefulsets,jobs,networkpolicies")
    return {f"{each['kind']} {each['metadata']['name']}": each["metadata"]["generation"] for each in found}


@pytest.mark.parametrize("major", [3, 4])
def test_claim_templates_outlive_upgrades(namespace: Kube, major: int) -> None:
    """A changed claim template or selector would be refused by the API server, and the upgrade with it."""
    install(namespace, CLAIMS, major=major)
    (before,) = [found for found in namespace.items("statefulsets") if found["spec"].get("volumeClaimTemplates")]
    upgrade(namespace, CLAIMS, *CHANGES, "image.tag=9.9.9", "redis.maxMemory=300Mi", major=major)
    after = namespace.get("statefulset", before["metadata"]["name"])
    assert after["metadata"]["generation"] > before["metadata"]["generation"]
    assert after["spec"]["volumeClaimTemplates"] == before["spec"]["volumeClaimTemplates"]


def test_two_releases_live_in_one_namespace(namespace: Kube) -> None:
    install(namespace)
    install(namespace, release="second")
    first, second = owned(namespace), owned(namespace, "second")
    assert first
    assert {name.replace("ryzanstein", "") for name in first} == {
        name.replace("second-ryzanstein", "") for name in second if "Job" not in name
    } | {name.replace("ryzanstein", "") for name in first if "Job" in name}
    namespace.helm("uninstall", "second")
    assert owned(namespace).keys() == first.keys()
    assert owned(namespace, "second") == {}


def test_another_generation_of_the_password_is_another_job(namespace: Kube) -> None:
    """Jobs are immutable: a changed one under the old name would make the upgrade fail."""
    install(namespace)
    (first,) = namespace.items("jobs")
    upgrade(namespace, "redis.auth.generation=2")
    (second,) = namespace.items("jobs")
    assert second["metadata"]["name"] != first["metadata"]["name"]
