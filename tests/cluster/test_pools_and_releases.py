"""Several models in a release, several releases side by side, and what is left when they go."""

from __future__ import annotations

import httpx
import pytest

from tests.cluster.conftest import Namespaces, settings
from tests.cluster.installation import Installation

pytestmark = pytest.mark.timeout(300)
SMALL = {"workers.defaults.resources.requests.cpu": "50m", "gateway.resources.requests.cpu": "20m"}
PAIRS = {
    **SMALL,
    "workers.pools.pair.servedName": "tiny-pair",
    "workers.pools.pair.tensorParallel": 2,
    "workers.pools.pair.replicas": 2,
}
KEPT = {**SMALL, "redis.persistence.enabled": "true"}
KINDS = (
    "deployments,statefulsets,jobs,cronjobs,services,configmaps,serviceaccounts,roles,rolebindings,networkpolicies,pods"
)
SERVICES = ("gateway", "router", "coordinator", "worker")


@pytest.fixture(scope="module")
def pools(namespaces: Namespaces) -> Installation:
    installation = Installation(namespaces("pools"))
    installation.install(*settings(PAIRS))
    return installation


def models(installation: Installation) -> set[str]:
    return {model["id"] for model in httpx.get(f"{installation.url}/v1/models").raise_for_status().json()["data"]}


def test_a_pool_for_each_model(pools: Installation) -> None:
    assert models(pools) == {"ryzanstein-tiny", "tiny-pair"}
    for model in models(pools):
        body = {"model": model, "prompt": "def ", "max_tokens": 4}
        assert httpx.post(f"{pools.url}/v1/completions", json=body).raise_for_status().json()["model"] == model


def test_releases_are_isolated_from_each_other(pools: Installation, namespaces: Namespaces) -> None:
    """One more in the same namespace and one in another; each has its own workers, and lists its own models."""
    neighbour = Installation(pools.kube, "neighbour")
    abroad = Installation(namespaces("abroad"))
    for installation in (neighbour, abroad):
        installation.install(*settings(SMALL))
        assert models(installation) == {"ryzanstein-tiny"}
    assert models(pools) == {"ryzanstein-tiny", "tiny-pair"}
    pools.kube.helm("uninstall", "neighbour", "--wait")
    assert models(pools) == {"ryzanstein-tiny", "tiny-pair"}
    left = "app.kubernetes.io/instance=neighbour"
    pools.kube.until("nothing is left", lambda: not pools.kube.items(KINDS, left))  # pods may still be ending


def test_reinstalled_release_reuses_passwords_certificates_and_claim(namespaces: Namespaces) -> None:
    """Only passwords, certificates and Redis's claim stay; a release of the same name finds in them what it had."""
    installation = Installation(namespaces("again"))
    installation.install(*settings(KEPT))
    assert installation.redis("set kept yes") == "OK"
    installation.kube.helm("uninstall", installation.release, "--wait")
    installation.kube.until("every pod is gone", lambda: not installation.kube.items("pods"))
    assert installation.kube.items(KINDS, "app.kubernetes.io/instance=ryzanstein") == []
    left = installation.kube.items("secrets,persistentvolumeclaims")
    certificates = {f"ryzanstein-tls-{name}" for name in ("ca", "admin", "redis", *SERVICES)}
    stored = {"ryzanstein-redis-auth-1", "ryzanstein-redis-users-1", "data-ryzanstein-redis-0"} | certificates
    assert {item["metadata"]["name"] for item in left} == stored
    installation.install(*settings(KEPT))
    assert installation.redis("get kept") == "yes"
