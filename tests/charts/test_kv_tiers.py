"""Host memory and disks for KV blocks: their settings and volumes in the pods of a pool."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.charts.rendering import Rendered, RenderError, environment, render

FOLDER = "/var/cache/ryzanstein-kv"


def pool(**values: object) -> Rendered:
    return render(inline=json.dumps({"workers": {"pools": {"default": values}}}))


@pytest.mark.parametrize(
    ("disk", "volume"),
    [
        ({"type": "emptyDir", "gib": 20}, {"emptyDir": {"sizeLimit": "23Gi"}}),
        ({"type": "hostPath", "hostPath": "/data"}, {"hostPath": {"path": "/data", "type": "Directory"}}),
        ({"type": "pvc", "existingClaim": "mine"}, {"persistentVolumeClaim": {"claimName": "mine"}}),
        (
            {"type": "ephemeral", "storageClass": "fast", "gib": 0.5},
            {
                "ephemeral": {
                    "volumeClaimTemplate": {
                        "spec": {
                            "accessModes": ["ReadWriteOnce"],
                            "storageClassName": "fast",
                            "resources": {"requests": {"storage": "2Gi"}},
                        }
                    }
                }
            },
        ),
    ],
)
def test_disk_is_mounted_and_named_to_the_worker(disk: dict[str, Any], volume: dict[str, Any]) -> None:
    for pod in pool(diskCache=disk).pods_of("worker"):
        (container,) = pod.containers
        assert environment(container)["RYZANSTEIN_DISK_CACHE"] == FOLDER
        assert float(environment(container)["RYZANSTEIN_DISK_CACHE_GIB"]) == disk.get("gib", 10)
        mounts = {mount["name"]: mount for mount in container["volumeMounts"]}
        assert mounts["kv-cache"] == {"name": "kv-cache", "mountPath": FOLDER}
        (there,) = [each for each in pod.spec["volumes"] if each["name"] == "kv-cache"]
        assert there == {"name": "kv-cache", **volume}


def test_disk_has_room_for_all_models_of_a_pod() -> None:
    models = [{"model": "file:///a"}, {"model": "file:///b"}]
    (pod,) = pool(models=models, diskCache={"type": "emptyDir", "gib": 20}).pods_of("worker")
    (there,) = [each for each in pod.spec["volumes"] if each["name"] == "kv-cache"]
    assert there["emptyDir"] == {"sizeLimit": "45Gi"}


@pytest.mark.parametrize(
    ("values", "writes"),
    [
        ({"diskCache": {"type": "pvc", "existingClaim": "mine"}}, True),
        ({"diskCache": {"type": "ephemeral"}}, True),
        ({"model": "hf://a/b", "storage": {"type": "perPod"}}, True),
        ({"model": "hf://a/b"}, False),
        ({"model": "pvc://models", "storage": {"type": "pvc"}}, False),
        ({"diskCache": {"type": "emptyDir"}}, False),
    ],
)
def test_claims_are_writable_for_the_group_of_their_pods(values: dict[str, Any], writes: bool) -> None:
    """A new volume is root's. On OpenShift the namespace has a group of its own."""
    for openshift in (False, True):
        rendered = render(inline=json.dumps({"openshift": openshift, "workers": {"pools": {"default": values}}}))
        for pod in rendered.pods_of("worker"):
            assert pod.spec["securityContext"].get("fsGroup") == (10001 if writes and not openshift else None)
            assert pod.spec["securityContext"]["runAsNonRoot"]


def test_places_are_off_by_default_and_host_memory_is_a_setting() -> None:
    for pod in render().pods_of("worker"):
        assert not [name for name in environment(pod.containers[0]) if "_CACHE_GIB" in name or "DISK_CACHE" in name]
        assert "kv-cache" not in {each["name"] for each in pod.spec["volumes"]}
    for pod in pool(hostCache={"gib": 2.5}).pods_of("worker"):
        assert float(environment(pod.containers[0])["RYZANSTEIN_HOST_CACHE_GIB"]) == 2.5


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"diskCache": {"type": "hostPath"}}, "diskCache.hostPath: type hostPath needs a folder of the node"),
        ({"diskCache": {"type": "pvc"}}, "diskCache.existingClaim: type pvc needs a claim of yours"),
        ({"diskCache": {"type": "tape"}}, "diskCache/type"),
        ({"diskCache": {"gib": 0}}, "diskCache/gib"),
        ({"hostCache": {"gib": -1}}, "hostCache/gib"),
        ({"settings": {"diskCache": "/x"}}, "diskCache"),
    ],
)
def test_wrong_values_are_refused_by_name(values: dict[str, Any], message: str) -> None:
    with pytest.raises(RenderError, match=message):
        pool(**values)
