"""Install, upgrade, roll back and uninstall with Helm 3, with Helm 4, and from one to the other."""

from __future__ import annotations

import pytest
import yaml

from tests.cluster.control_plane.releases import NOWHERE, RELEASE, install, owned, replicas, specs, upgrade
from tests.cluster.kube import Kube, KubeCommandError, Object, client_pod
from tests.programs import CHART

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
WORKLOADS = ("Deployment", "StatefulSet")


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
    manifests = kube.items("deployments,statefulsets,jobs,networkpolicies")
    return {f"{each['kind']} {each['metadata']['name']}": each["metadata"]["generation"] for each in manifests}


OWN = "redis.auth.existingSecret.name=own"
BY_HAND = ("secrets.generate=false", "tls.mode=off")


@pytest.mark.parametrize(
    ("sets", "made", "message"),
    [
        pytest.param(
            (OWN,), {"own": ["password", "gateway"]}, "router, coordinator, worker in the secret own", id="own"
        ),
        pytest.param(
            BY_HAND, {"ryzanstein-redis-auth-1": ["password"]}, "in the secret ryzanstein-redis-users-1", id="by hand"
        ),
        pytest.param(
            (),
            {"ryzanstein-redis-auth-1": ["password"], "ryzanstein-redis-users-1": ["gateway", "router"]},
            "redis.auth.generation: the secret ryzanstein-redis-users-1 has no password for coordinator",
            id="of an earlier version",
        ),
    ],
)
def test_upgrade_without_component_passwords_is_rejected_before_any_change(
    namespace: Kube, sets: tuple[str, ...], made: dict[str, list[str]], message: str
) -> None:
    install(namespace, *sets, "redis.auth.users=shared")
    before = specs(namespace)
    for name, keys in made.items():
        data = dict.fromkeys(keys, "secret")
        namespace.apply({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "stringData": data})
    for major in (3, 4):
        with pytest.raises(KubeCommandError, match=message):
            upgrade(namespace, *sets, major=major)
    assert specs(namespace) == before
    upgrade(namespace, *sets, "redis.auth.users=shared")


def test_upgrade_advances_tls_a_single_phase_beyond_the_last_pod(namespace: Kube) -> None:
    """And has all of mutual TLS where nothing of the release runs, or nothing is seen."""
    namespace.apply(pod("other", "gateway", "", release="other"))
    assert next_phase(namespace) == "require"
    namespace.apply(pod("redis", "redis", "bundled"), pod("worker", "worker", "use"))
    assert next_phase(namespace) == "require"
    namespace.apply(pod("router", "router", "offer"))
    assert next_phase(namespace) == "use"
    namespace.apply(pod("gateway", "gateway", ""))
    assert next_phase(namespace) == next_phase(namespace, major=4) == "offer"
    assert next_phase(namespace, "--dry-run=client") == "require"
    namespace.kubectl("patch", "pod", "gateway", "--subresource=status", '--patch={"status": {"phase": "Failed"}}')
    assert next_phase(namespace) == "use"


def pod(name: str, component: str, phase: str, release: str = RELEASE) -> Object:
    """One that the release could have: without a phase it speaks plain text; Redis gets none."""
    labels = {"name": "ryzanstein", "instance": release, "component": component}
    made = client_pod(name, "cli", ("true",), {f"app.kubernetes.io/{key}": value for key, value in labels.items()})
    made["spec"]["nodeSelector"] = {"ryzanstein.dev/test": "none"}
    if phase:
        made["spec"]["volumes"] = [{"name": "tls", "secret": {"secretName": "any"}}]
    if component != "redis" and phase:
        made["spec"]["containers"][0]["env"] = [{"name": "RYZANSTEIN_TLS_PHASE", "value": phase}]
    return made


def next_phase(kube: Kube, mode: str = "--dry-run=server", major: int = 3) -> str:
    """The phase of an upgrade of the release; it is the same in all of its pods."""
    text = kube.helm("template", RELEASE, str(CHART), "--is-upgrade", mode, "--set", NOWHERE, major=major)
    specs = [each["spec"]["template"]["spec"] for each in yaml.safe_load_all(text) if each["kind"] in WORKLOADS]
    variables = [variable for spec in specs for variable in spec["containers"][0].get("env", ())]
    (phase,) = {each["value"] for each in variables if each["name"] == "RYZANSTEIN_TLS_PHASE"}
    return str(phase)
