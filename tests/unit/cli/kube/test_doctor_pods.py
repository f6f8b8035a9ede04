"""`ryzanstein kube doctor` names why a pod does not run, and a command that mends it."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from datetime import datetime

import pytest

from services.cli.kube.diagnosis import diagnose
from services.cli.kube.doctor import report
from services.common.lifecycle import StartupError
from services.compute.backends.sizing import HostRoom
from services.compute.model.footprint import footprint
from services.worker.native.startup import group_config, read_model, require_room
from services.worker.settings import WorkerSettings
from tests.models import BUNDLED_MODEL
from tests.unit.cli.kube.objects import BrokenInstallation, event, labels, one


@pytest.mark.parametrize(
    ("message", "why", "do"),
    [
        (
            "0/1 nodes are available: 1 Insufficient nvidia.com/gpu. preemption: 0/1 nodes are available.",
            "no node offers nvidia.com/gpu",
            "device-plugin",
        ),
        ("0/1 nodes are available: 1 Insufficient example.com/npu.", "as much, but not free", "default.gpu.count=LESS"),
        ("0/1 nodes are available: 1 Insufficient cpu.", "nodes have as much, but not free", "requests.cpu"),
        (
            "0/1 nodes are available: 1 node(s) had untolerated taint {nvidia.com/gpu: present}.",
            "taint nvidia.com/gpu",
            "workers.pools.default.tolerations",
        ),
        (
            "0/1 nodes are available: 1 node(s) didn't match Pod's node affinity/selector.",
            "no node has the labels",
            "--show-labels",
        ),
        (
            "0/1 nodes are available: 1 node(s) didn't match pod topology spread constraints.",
            "every node has one",
            "topologySpread=soft",
        ),
        ("0/1 nodes are available: 1 node(s) were unschedulable.", "were unschedulable", "describe pod"),
    ],
)
def test_pending_for_want_of_a_node(message: str, why: str, do: str) -> None:
    broken = BrokenInstallation()
    broken.objects["nodes"][0]["status"]["allocatable"]["example.com/npu"] = "2"
    broken.pending("worker", message)
    finding = one(broken)
    assert (finding.where, finding.what) == ("pod/ryzanstein-workers-default-0", "Pending")
    assert why in finding.why
    assert any(do in step for step in finding.do)


def test_a_pod_that_no_node_could_ever_take() -> None:
    broken = BrokenInstallation()
    resources = broken.pending("worker", "0/1 nodes are available: 1 Insufficient memory.")["spec"]["containers"][0][
        "resources"
    ]
    resources["requests"]["memory"] = "64Gi"
    assert "asks for 64.0 GiB memory, and the largest node has 4.0 GiB" in one(broken).why


def test_each_reason_of_the_scheduler_is_named() -> None:
    broken = BrokenInstallation()
    broken.pending("worker", "0/3 nodes are available: 1 Insufficient cpu, 2 Insufficient memory. preemption: none")
    findings = [each.why for each in diagnose(broken.snapshot)]
    assert len(findings) == 2
    assert "cpu" in findings[0]
    assert "memory" in findings[1]


@pytest.mark.parametrize(
    ("storage_class", "events", "why"),
    [
        ("fast", [], "no StorageClass fast; there are: standard"),
        (None, [], "no default one"),
        ("standard", [], "its provisioner has not answered"),
        ("standard", ["no space left on any node"], "no space left on any node"),
    ],
)
def test_a_claim_that_is_not_bound(storage_class: str | None, events: list[str], why: str) -> None:
    broken = BrokenInstallation()
    pending = broken.pending("worker", "0/1 nodes are available: pod has unbound immediate PersistentVolumeClaims.")
    pending["spec"]["volumes"] = [
        {"name": each, "persistentVolumeClaim": {"claimName": each}} for each in ("models", "bound")
    ]
    broken.objects["persistentvolumeclaims"] = [
        {"metadata": {"name": each}, "spec": {"storageClassName": storage_class}, "status": {"phase": phase}}
        for each, phase in (("models", "Pending"), ("bound", "Bound"))
    ]
    broken.objects["events"] = [event("PersistentVolumeClaim", "models", "Failed", text) for text in events]
    finding = one(broken)
    assert finding.where == "pvc/models"
    assert why in finding.why
    del broken.objects["persistentvolumeclaims"][0]
    assert one(broken).why == "the claim models does not exist"


@pytest.mark.parametrize(
    ("message", "why", "do"),
    [
        ("failed to resolve reference: ghcr.io/x: not found", "no such image", "image.tag"),
        ("unexpected status: 401 Unauthorized", "wants a password", "imagePullSecrets"),
        ("dial tcp: i/o timeout", "is not reached", "imageRegistry"),
    ],
)
def test_an_image_that_is_not_pulled(message: str, why: str, do: str) -> None:
    broken = BrokenInstallation()
    broken.waiting("gateway", "ImagePullBackOff", 'Back-off pulling image "x"')
    broken.event("gateway", "Failed", f'Failed to pull image "x": {message}')
    finding = one(broken)
    assert why in finding.why
    assert "gateway-0.1.0" in finding.why
    assert any(do in step for step in finding.do)


@pytest.mark.parametrize(
    ("message", "do"),
    [
        (
            'MountVolume.SetUp failed for volume "redis-auth" : secret "ryzanstein-redis-auth-1" not found',
            ["component=secrets", 'create secret generic ryzanstein-redis-auth-1 --from-literal=password="$(openssl'],
        ),
        (
            'MountVolume.SetUp failed for volume "redis-auth" : secret "ryzanstein-redis-users-1" not found',
            ["component=secrets", 'ryzanstein-redis-users-1 --from-literal=gateway="$(openssl'],
        ),
        ('MountVolume.SetUp failed for volume "hub" : secret "hub-token" not found', ["generic hub-token"]),
        ('MountVolume.SetUp failed for volume "models" : mount failed: exit status 32', []),
        ('Multi-Attach error for volume "pvc-1": it is used on another node', ["ReadWriteMany"]),
    ],
)
def test_a_volume_that_is_not_mounted(message: str, do: list[str]) -> None:
    broken = BrokenInstallation()
    broken.not_ready("router")["status"]["containerStatuses"][0] |= {
        "started": False,
        "state": {"waiting": {"reason": "ContainerCreating"}},
    }
    assert not diagnose(broken.snapshot), "it has just been placed"
    broken.event("router", "FailedMount", message)
    finding = one(broken)
    assert (finding.where, finding.what) == ("pod/ryzanstein-router-0", "Pending")
    assert message in finding.why
    assert len(finding.do) == len(do)
    assert all(words in step for words, step in zip(do, finding.do, strict=True))


def test_a_container_without_its_secret_key_is_diagnosed() -> None:
    broken = BrokenInstallation()
    broken.waiting("router", "CreateContainerConfigError", "couldn't find key password in Secret llm/own")
    finding = one(broken)
    assert finding.why == "its container can't be made: couldn't find key password in Secret llm/own"
    assert finding.do == ("kubectl -n serving describe pod ryzanstein-router-0",)


@pytest.mark.parametrize(
    ("status", "why"),
    [
        ({"reason": "Evicted", "message": "the node was low on memory"}, "Evicted: the node was low on memory"),
        ({}, "it ended with an error: see its log"),
    ],
)
def test_a_pod_that_has_failed(status: dict[str, str], why: str) -> None:
    broken = BrokenInstallation()
    broken.pod("worker")["status"] = {"phase": "Failed", **status}
    finding = one(broken)
    assert (finding.what, finding.why) == ("failed", why)
    assert finding.do[0] == "kubectl -n serving logs ryzanstein-workers-default-0"


def test_a_fetch_that_succeeded_at_its_second_attempt_is_over() -> None:
    broken = BrokenInstallation()
    fetch = {"name": "fetch", "image": "cli", "restartCount": 1, "state": {"terminated": {"exitCode": 0}}}
    broken.pod("worker")["status"]["initContainerStatuses"] = [fetch]
    assert one(broken).harmless
    fetch["state"] = {"terminated": {"exitCode": 1}}
    assert not one(broken).harmless


def test_a_container_killed_for_memory() -> None:
    broken = BrokenInstallation()
    broken.restarted("worker", 3, reason="OOMKilled", exitCode=137)
    finding = one(broken)
    assert (finding.what, finding.why) == ("restarting", "killed for memory at its limit of 2Gi (3 times)")
    assert "workers.pools.default.resources.limits.memory" in finding.do[0]


def test_a_container_that_runs_well_since_its_restarts(capsys: pytest.CaptureFixture[str]) -> None:
    broken = BrokenInstallation()
    worker = broken.pod("worker")["status"]["containerStatuses"][0]
    broken.restarted("worker", 3, reason="OOMKilled", exitCode=137)
    started = datetime.fromisoformat(worker["state"]["running"]["startedAt"]).timestamp()
    assert not report(replace(broken.snapshot, now=started + 360), as_json=False)
    output = capsys.readouterr().out
    assert "pod/ryzanstein-workers-default-0 is well again, and was restarting" in output
    assert "killed for memory at its limit of 2Gi (3 times)" in output
    assert "is well: 6 pods" in output
    assert report(replace(broken.snapshot, now=started + 60), as_json=False)
    worker["ready"] = False
    assert report(replace(broken.snapshot, now=started + 360), as_json=False)


def test_an_out_of_memory_worker_is_diagnosed_with_its_own_numbers() -> None:
    """The number is what the worker itself says, in its own words."""
    files, settings = read_model(BUNDLED_MODEL), WorkerSettings(model="/models/m")
    config = replace(group_config(settings, files), device="cpu")
    with pytest.raises(StartupError) as refused:
        require_room(settings, files.spec, config, HostRoom(100 << 20, 2048 << 20))
    broken = BrokenInstallation()
    broken.waiting("worker", "CrashLoopBackOff", "back-off 5m0s restarting failed container")
    broken.restarted("worker", 2, reason="Error", exitCode=1, message=json.dumps({"message": str(refused.value)}))
    finding = one(broken)
    needed = footprint(files.spec, config).of_worker(2048).total / 2**20
    assert f"workers.pools.default.resources.limits.memory={math.ceil(needed + 2048 - 100)}Mi" in finding.do[0]


@pytest.mark.parametrize(
    ("probe", "why", "do"),
    [
        ("startup", "did not start within its budget", "startupBudgetSeconds"),
        ("liveness", "did not answer its liveness probe", "--previous"),
    ],
)
def test_a_container_killed_by_a_probe(probe: str, why: str, do: str) -> None:
    broken = BrokenInstallation()
    broken.restarted("worker", 1, reason="Error", exitCode=137)
    broken.event("worker", "Killing", f"Container worker failed {probe} probe, will be restarted")
    finding = one(broken)
    assert why in finding.why
    assert do in finding.do[0]


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        (
            '{"message": "starting"}\n{"level": "error", "message": "cannot start: no model in /m"}\n',
            ": cannot start: no model in /m",
        ),
        ("Traceback\nMemoryError: no room\n", ": MemoryError: no room"),
        ("", ""),
    ],
)
def test_a_process_that_exits_is_diagnosed(log: str, expected: str) -> None:
    broken = BrokenInstallation()
    broken.waiting("router", "CrashLoopBackOff", "back-off 5m0s restarting failed container")
    broken.restarted("router", 7, reason="Error", exitCode=1, message=log)
    finding = one(broken)
    assert finding.why == f"its process ends with status 1 (7 times){expected}"
    assert "logs ryzanstein-router-0 -c router --previous" in finding.do[0]


def test_a_running_pod_that_is_not_ready_waits_for_its_dependencies() -> None:
    broken = BrokenInstallation()
    broken.not_ready("gateway")
    broken.not_ready("router")
    broken.event("gateway", "Unhealthy", "Readiness probe failed: HTTP probe failed with statuscode: 503")
    findings = {each.where: each for each in diagnose(broken.snapshot)}
    gateway = findings["pod/ryzanstein-gateway-6d5f-x"]
    assert "a router has answered" in gateway.why
    assert "not ready itself: router" in gateway.why
    assert "statuscode: 503" in gateway.why
    assert "Redis" in findings["pod/ryzanstein-router-0"].why
    assert "none of its 1 pods is ready" in findings["service/ryzanstein-gateway"].why


def test_a_model_that_is_being_fetched_is_said_to_be() -> None:
    broken = BrokenInstallation()
    worker = broken.not_ready("worker")
    worker["status"]["initContainerStatuses"] = [{"name": "fetch", "image": "cli", "state": {"running": {}}}]
    worker["status"]["containerStatuses"][0] |= {"started": False, "state": {"waiting": {"reason": "PodInitializing"}}}
    assert "being fetched" in one(broken).why


def test_pods_rejected_at_creation_are_diagnosed() -> None:
    for message, why in (
        ('pods "x" is forbidden: exceeded quota: team, requested: cpu=1', "quota is used up"),
        ('pods "x" is forbidden: violates PodSecurity "restricted:latest"', "Pod Security refuses"),
        ('admission webhook "policy.example" denied the request', "its pods are refused: admission webhook"),
    ):
        broken = BrokenInstallation()
        broken.objects["pods"].remove(broken.pod("worker"))
        broken.objects["statefulsets"] = [
            {
                "metadata": {"name": "ryzanstein-workers-default", "labels": labels("worker")},
                "spec": {"replicas": 1},
                "status": {"replicas": 0},
            }
        ]
        assert diagnose(broken.snapshot) == [], "its controller has not tried yet"
        broken.objects["events"].append(event("StatefulSet", "ryzanstein-workers-default", "FailedCreate", message))
        assert why in one(broken).why
