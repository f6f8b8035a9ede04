"""Objects as an API server gives them, cut to what a diagnosis reads: a healthy installation, and ways to break it."""

from __future__ import annotations

import copy
from typing import Any

from services.cli.kube.diagnosis import diagnose
from services.cli.kube.diagnosis.finding import Finding
from services.cli.kube.diagnosis.snapshot import ClusterSnapshot, Object

NAMESPACE, RELEASE = "serving", "ryzanstein"


def labels(component: str, **more: str) -> dict[str, str]:
    return {
        "app.kubernetes.io/name": "ryzanstein",
        "app.kubernetes.io/instance": RELEASE,
        "app.kubernetes.io/component": component,
        **more,
    }


def pod(name: str, component: str, **pool: str) -> Object:
    """Running and ready."""
    resources = {"requests": {"cpu": "500m", "memory": "1Gi"}, "limits": {"memory": "2Gi"}}
    return {
        "metadata": {"name": name, "labels": labels(component, **pool), "ownerReferences": []},
        "spec": {"nodeName": "n1", "containers": [{"name": component, "resources": resources}], "volumes": []},
        "status": {
            "phase": "Running",
            "conditions": [
                {"type": "PodScheduled", "status": "True"},
                {"type": "Ready", "status": "True"},
            ],
            "containerStatuses": [container(component)],
        },
    }


def container(name: str, **fields: Any) -> Object:
    return {
        "name": name,
        "image": f"ghcr.io/ryzanstein/ryzanstein:{name}-0.1.0",
        "imageID": "",
        "ready": True,
        "started": True,
        "restartCount": 0,
        "state": {"running": {"startedAt": "2026-11-25T10:00:00Z"}},
        "lastState": {},
        **fields,
    }


def event(kind: str, name: str, reason: str, message: str) -> Object:
    return {
        "involvedObject": {"kind": kind, "name": name},
        "reason": reason,
        "message": message,
        "lastTimestamp": "2026-11-25T10:01:00Z",
    }


def healthy() -> dict[str, list[Object]]:
    """The objects of `helm install` with default values when all is well."""
    names = {"gateway": "ryzanstein-gateway-6d5f-x", "router": "ryzanstein-router-0", "redis": "ryzanstein-redis-0"}
    pods = [pod(name, component) for component, name in names.items()]
    pods += [pod("ryzanstein-coordinator-77b-y", "coordinator"), pod("ryzanstein-prometheus-1-z", "prometheus")]
    pods.append(pod("ryzanstein-workers-default-0", "worker", **{"ryzanstein.dev/pool": "default"}))
    open_to_prometheus = {"ports": [{"protocol": "TCP", "port": 9100}], "from": [{"podSelector": {}}]}
    return {
        "pods": pods,
        "nodes": [{"metadata": {"name": "n1"}, "status": {"allocatable": {"cpu": "2", "memory": "4Gi"}}}],
        "services": [
            {
                "metadata": {"name": "ryzanstein-gateway", "labels": labels("gateway")},
                "spec": {"type": "ClusterIP", "selector": labels("gateway")},
                "status": {"loadBalancer": {}},
            }
        ],
        "networkpolicies": [
            {
                "metadata": {"name": "ryzanstein-default-deny", "labels": labels("default-deny")},
                "spec": {
                    "podSelector": {"matchLabels": {"app.kubernetes.io/instance": RELEASE}},
                    "policyTypes": ["Ingress", "Egress"],
                    "ingress": [open_to_prometheus],
                },
            }
        ],
        "storageclasses": [{"metadata": {"name": "standard"}}],
        "events": [],
    }


def snapshot(objects: dict[str, list[Object]], *unread: str) -> ClusterSnapshot:
    return ClusterSnapshot(NAMESPACE, RELEASE, objects, frozenset(unread))


class BrokenInstallation:
    """A copy of the healthy installation that a test changes."""

    def __init__(self) -> None:
        self.objects = copy.deepcopy(healthy())

    def pod(self, component: str) -> Object:
        return next(
            each
            for each in self.objects["pods"]
            if each["metadata"]["labels"]["app.kubernetes.io/component"] == component
        )

    def pending(self, component: str, message: str) -> Object:
        target = self.pod(component)
        del target["spec"]["nodeName"]
        condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
        target["status"] = {"phase": "Pending", "conditions": [condition]}
        return target

    def waiting(self, component: str, reason: str, message: str) -> Object:
        target = self.pod(component)
        target["status"]["conditions"][1]["status"] = "False"
        waits = container(
            component, ready=False, started=False, state={"waiting": {"reason": reason, "message": message}}
        )
        target["status"]["containerStatuses"] = [waits]
        return target

    def restarted(self, component: str, times: int, **terminated: Any) -> None:
        """Its container has ended so often, at last like that."""
        status = self.pod(component)["status"]["containerStatuses"][0]
        status |= {"restartCount": times, "lastState": {"terminated": terminated}}

    def not_ready(self, component: str) -> Object:
        target = self.pod(component)
        target["status"]["conditions"][1]["status"] = "False"
        return target

    def event(self, component: str, reason: str, message: str) -> None:
        self.objects["events"].append(event("Pod", self.pod(component)["metadata"]["name"], reason, message))

    @property
    def snapshot(self) -> ClusterSnapshot:
        return snapshot(self.objects)


def one(broken: BrokenInstallation) -> Finding:
    """The only finding that is not merely a Service whose pods are not ready."""
    findings = [each for each in diagnose(broken.snapshot) if not each.where.startswith("service/")]
    assert len(findings) == 1, findings
    return findings[0]
