"""Upgrades between values whose objects differ in what Kubernetes fixes: they work, or change nothing and say why."""

from __future__ import annotations

import itertools
import json
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.charts.rendering import ALL_VALUES, PROFILES, render
from tests.charts.test_fixed import fixed
from tests.cluster.control_plane.releases import KINDS, NOWHERE, RELEASE, install, upgrade
from tests.cluster.kube import Kube, KubeCommandError, Object
from tests.programs import CHART

pytestmark = pytest.mark.timeout(600)
CLAIMS = ("volumeClaimTemplates", "accessModes", "storageClassName", "resources")
PER_POD = ("workers.pools.default.model=hf://org/name", "workers.pools.default.storage.type=perPod")
SHARED = ("workers.pools.default.model=hf://org/name", "workers.pools.default.storage.type=pvc")
BALANCER = "gateway.service.type=LoadBalancer"
PERSISTENT = "redis.persistence.enabled=true"
MORE = "gateway.replicas=2"  # a change that a refused upgrade must not have made
UNCHANGED = "nothing has been changed"
REDIS, WORKERS, DATA = "ryzanstein-redis", "ryzanstein-workers-default", "data-ryzanstein-redis-0"


def versions(kube: Kube) -> dict[str, str]:
    """The generation of each object, or of one without a spec its content.

    Claims that a StatefulSet's controller makes are left out: they come in its own time.
    """
    manifest = kube.items(KINDS, f"app.kubernetes.io/instance={RELEASE}")
    return {
        f"{each['kind']} {each['metadata']['name']}": str(each["metadata"].get("generation", each.get("data")))
        for each in manifest
        if each["kind"] != "Secret" and not each["metadata"].get("ownerReferences") and not _made_later(each)
    }


def _made_later(manifest: Object) -> bool:
    of_release = "meta.helm.sh/release-name" in manifest["metadata"].get("annotations", {})
    return manifest["kind"] == "PersistentVolumeClaim" and not of_release


def refusal(kube: Kube, *sets: str, major: int = 3) -> str:
    """The words by which an upgrade is refused; it must have changed no object."""
    before = versions(kube)
    with pytest.raises(KubeCommandError) as refused:
        upgrade(kube, MORE, *sets, major=major)
    assert UNCHANGED in str(refused.value)
    assert versions(kube) == before
    return str(refused.value)


def attempt(kube: Kube, values: Path, major: int) -> str:
    """The error of an upgrade to a file's values; empty: it has succeeded."""
    prefix = f"redis.keyPrefix={kube.namespace}-{RELEASE}"  # a release keeps its own
    args = ("--reset-values", "--values", str(values), "--set", NOWHERE, "--set", prefix)
    try:
        kube.helm("upgrade", RELEASE, str(CHART), *args, major=major)
    except KubeCommandError as error:
        return str(error)
    return ""


def follow(kube: Kube, refused: str) -> None:
    """Type the commands that a refusal shows."""
    lines = [line.strip() for line in refused.splitlines() if line.strip().startswith("kubectl -n ")]
    assert lines, refused
    for line in lines:
        kube.kubectl(*shlex.split(line)[3:])


def claims_of(values: Path) -> str:
    """The claims that values make, which alone can be refused."""
    manifest = {str(key): field for key, field in fixed(render(values)) if key[1] in CLAIMS and field}
    return json.dumps(manifest, sort_keys=True)


def walk() -> Iterator[Path]:
    """Profiles so that those with different claims follow each other; then every other file with claims of its own."""
    yield from PROFILES
    chosen = list({claims_of(values): values for values in PROFILES}.values())
    for first, *rest in (chosen[index:] for index in range(len(chosen))):
        yield from itertools.chain.from_iterable((first, other) for other in rest)
        yield first
    yield from {claims_of(values): values for values in ALL_VALUES}.values()


def test_profiles_follow_each_other(namespace: Kube, figures: dict[str, object]) -> None:
    """With Helm 3 and 4 in turn. Where a claim is in the way, the refusal's commands lead on."""
    install(namespace)
    refused = upgrades = 0
    for values, major in zip(walk(), itertools.cycle((3, 4))):
        before = versions(namespace)
        upgrades += 1
        if error := attempt(namespace, values, major):
            assert UNCHANGED in error, f"{values}: {error}"
            assert versions(namespace) == before
            refused += 1
            upgrade(namespace, major=major)
            follow(namespace, error)
            assert not attempt(namespace, values, major)
    figures["upgrades between values files, of which refused"] = (upgrades, refused)


@pytest.mark.parametrize("major", [3, 4])
def test_persistence_of_redis_is_switched_in_a_running_release(namespace: Kube, major: int) -> None:
    """As for keys that are required: with tenancy. The claim stays and is taken up again."""
    install(namespace, major=major)
    upgrade(namespace, PERSISTENT, "gateway.tenancy.enabled=true", major=major)
    claim = namespace.get("persistentvolumeclaim", DATA)
    upgrade(namespace, major=major)
    upgrade(namespace, PERSISTENT, major=major)
    again = namespace.get("persistentvolumeclaim", DATA)
    assert again["metadata"]["uid"] == claim["metadata"]["uid"]
    assert volumes(namespace)["data"] == {"claimName": DATA}


def volumes(kube: Kube) -> dict[str, Object | None]:
    """The claims of Redis' pod by volume."""
    spec = kube.get("statefulset", REDIS)["spec"]["template"]["spec"]
    return {volume["name"]: volume.get("persistentVolumeClaim") for volume in spec["volumes"]}


@pytest.mark.parametrize("major", [3, 4])
def test_claims_of_a_pool_are_refused_and_the_commands_lead_on(namespace: Kube, major: int) -> None:
    install(namespace, *PER_POD, major=major)
    for sets in ((), (*PER_POD, "workers.pools.default.storage.size=60Gi"), SHARED):
        assert "workers.pools.default.storage: " in refusal(namespace, *sets, major=major)
    upgrade(namespace, *PER_POD, "workers.pools.default.storage.size=51200Mi", major=major)  # as much as before
    refused = refusal(namespace, *SHARED, major=major)
    namespace.until("the pool has its pod", lambda: bool(namespace.pods("worker")))
    (before,) = namespace.pods("worker")
    follow(namespace, refused)
    upgrade(namespace, *SHARED, major=major)
    assert "volumeClaimTemplates" not in namespace.get("statefulset", WORKERS)["spec"]
    uid = namespace.get("statefulset", WORKERS)["metadata"]["uid"]

    def adopted() -> bool:
        pods = namespace.pods("worker")
        return bool(pods) and pods[0]["metadata"].get("ownerReferences", [{}])[0].get("uid") == uid

    assert before["metadata"]["name"] == f"{WORKERS}-0"
    namespace.until("the new set has the pod", adopted)


@pytest.mark.parametrize(
    ("first", "then", "value"),
    [
        (("storage.size=9Gi",), ("storage.size=8Gi",), "workers.pools.default.storage"),
        (("storage.storageClass=fast",), (), "workers.pools.default.storage"),
        ((), ("storage.storageClass=fast",), "workers.pools.default.storage"),
        ((), ("storage.accessModes={ReadWriteOnce}",), "workers.pools.default.storage"),
    ],
)
def test_change_of_an_immutable_claim_is_rejected(
    namespace: Kube, first: tuple[str, ...], then: tuple[str, ...], value: str
) -> None:
    was, wanted = ([*SHARED, *(f"workers.pools.default.{each}" for each in sets)] for sets in (first, then))
    install(namespace, *was)
    assert f"{value}: " in refusal(namespace, *wanted)
    upgrade(namespace)
    refused = refusal(namespace, *wanted)  # the claim was kept
    follow(namespace, refused)
    upgrade(namespace, *wanted)


def test_the_class_of_a_load_balancer_is_refused(namespace: Kube) -> None:
    named = f"{BALANCER},gateway.service.loadBalancerClass=example.com/one"
    install(namespace, named)
    for sets in (BALANCER, named.replace("one", "two")):
        assert "gateway.service.loadBalancerClass: " in refusal(namespace, sets)
    upgrade(namespace, "gateway.service.type=ClusterIP")
    upgrade(namespace, BALANCER)
    assert "gateway.service.loadBalancerClass: " in refusal(namespace, named)


def test_a_load_balancer_s_class_that_the_cloud_has_filled_in_stays(namespace: Kube) -> None:
    install(namespace)
    filled = {"spec": {"type": "LoadBalancer", "loadBalancerClass": "cloud.example/own"}}
    namespace.kubectl("patch", "service", "ryzanstein-gateway", "-p", json.dumps(filled))
    upgrade(namespace, BALANCER)
    assert namespace.get("service", "ryzanstein-gateway")["spec"]["loadBalancerClass"] == "cloud.example/own"


def test_redis_of_an_earlier_chart_goes_on_to_make_its_claim(namespace: Kube) -> None:
    install(namespace)
    made = namespace.get("statefulset", REDIS)
    for name in ("status", "metadata"):
        made[name] = {key: made[name][key] for key in ("name", "labels", "annotations") if key in made[name]}
    pod = made["spec"]["template"]["spec"]
    pod["volumes"] = [volume for volume in pod["volumes"] if volume["name"] != "data"]
    spec = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}
    labels = made["spec"]["selector"]["matchLabels"]
    made["spec"]["volumeClaimTemplates"] = [{"metadata": {"name": "data", "labels": labels}, "spec": spec}]
    namespace.kubectl("delete", "statefulset", REDIS)
    namespace.kubectl("create", "-f", "-", stdin=yaml.safe_dump(made))
    namespace.until("it has made its claim", lambda: bool(namespace.items("persistentvolumeclaims")))
    claim = namespace.get("persistentvolumeclaim", DATA)

    upgrade(namespace, PERSISTENT, MORE)
    assert namespace.get("statefulset", REDIS)["spec"]["volumeClaimTemplates"]
    assert "redis.persistence: " in refusal(namespace)
    follow(namespace, refusal(namespace, PERSISTENT, "redis.persistence.size=2Gi"))
    upgrade(namespace, PERSISTENT, args=("--take-ownership",))
    assert volumes(namespace)["data"] == {"claimName": DATA}
    assert namespace.get("persistentvolumeclaim", DATA)["metadata"]["uid"] == claim["metadata"]["uid"]


def test_bound_claim_grows_when_its_storage_class_allows(namespace: Kube, classes: dict[bool, str]) -> None:
    for grows, name in classes.items():
        sets = (PERSISTENT, f"redis.persistence.storageClass={name}")
        if grows:
            follow(namespace, refusal(namespace, *sets))  # the claim of the other class was kept
        upgrade(namespace, *sets) if grows else install(namespace, *sets)
        larger = (*sets, "redis.persistence.size=2Gi")
        assert "redis.persistence: " in refusal(namespace, *larger), "it is not bound"
        bind(namespace, name)
        if not grows:
            assert "redis.persistence: " in refusal(namespace, *larger)
            upgrade(namespace)
    upgrade(namespace, *larger)
    assert namespace.get("persistentvolumeclaim", DATA)["spec"]["resources"]["requests"]["storage"] == "2Gi"


def bind(kube: Kube, name: str) -> None:
    """Make a volume for Redis' claim, as a provisioner would."""
    spec = {
        "capacity": {"storage": "1Gi"},
        "accessModes": ["ReadWriteOnce"],
        "storageClassName": name,
        "hostPath": {"path": "/nowhere"},
        "claimRef": {"namespace": kube.namespace, "name": DATA},
    }
    kube.apply({"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": name}, "spec": spec})
    kube.until("the claim is bound", lambda: kube.get("persistentvolumeclaim", DATA)["status"]["phase"] == "Bound")


@pytest.fixture
def classes(namespace: Kube) -> Iterator[dict[bool, str]]:
    """Storage classes by whether their claims may grow."""
    names = {grows: f"grows-{grows}-{namespace.namespace[-4:]}".lower() for grows in (False, True)}
    for grows, name in names.items():
        kind = {"apiVersion": "storage.k8s.io/v1", "kind": "StorageClass", "metadata": {"name": name}}
        namespace.apply({**kind, "provisioner": "example.com/none", "allowVolumeExpansion": grows})
    yield names
    for name in names.values():
        namespace.kubectl("delete", "storageclass,persistentvolume", name, "--wait=false", "--ignore-not-found")
