"""Explains why the scheduler places a pod on no node."""

from __future__ import annotations

import re
from collections.abc import Iterator

from services.cli.kube.diagnosis.finding import Finding
from services.cli.kube.diagnosis.snapshot import COMPONENT, ClusterSnapshot, Object, labels, name

_UNITS = {"m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


def unschedulable(snapshot: ClusterSnapshot, pod: Object) -> Iterator[Finding]:
    """A finding for each reason that the scheduler gives."""
    conditions = pod["status"].get("conditions") or ()
    message = next((each.get("message", "") for each in conditions if each["type"] == "PodScheduled"), "")
    where, explained = f"pod/{name(pod)}", False
    for resource in dict.fromkeys(re.findall(r"Insufficient ([\w./-]+?)(?=[,.]? |[,.]?$)", message)):
        explained = True
        yield Finding(where, "Pending", *_too_large(snapshot, pod, resource))
    for taint in dict.fromkeys(re.findall(r"untolerated taint\(?s?\)? \{([^}:]+)", message)):
        explained = True
        value = f'--set-json \'{_place(pod)}.tolerations=[{{"key":"{taint}","operator":"Exists"}}]\''
        yield Finding(
            where, "Pending", f"nodes have the taint {taint}, which it does not tolerate", (snapshot.upgrade(value),)
        )
    if "node affinity" in message or "node selector" in message:
        explained = True
        wanted = pod["spec"].get("nodeSelector") or "its affinity"
        yield Finding(where, "Pending", f"no node has the labels of {wanted}", ("kubectl get nodes --show-labels",))
    if "topology spread" in message:
        explained = True
        why = "podDefaults.topologySpread is hard, and every node has one of it already"
        yield Finding(
            where, "Pending", why, (snapshot.upgrade("--set podDefaults.topologySpread=soft"), "or add a node")
        )
    claims = list(_claims(snapshot, pod))
    yield from claims
    if not (explained or claims):
        why = message or "the scheduler has not looked at it yet"
        yield Finding(where, "Pending", why, (snapshot.kubectl(f"describe pod {name(pod)}"),))


def _too_large(snapshot: ClusterSnapshot, pod: Object, resource: str) -> tuple[str, tuple[str, ...]]:
    wanted = sum(_requested(container, resource) for container in pod["spec"]["containers"])
    offers = [_quantity(node["status"].get("allocatable", {}).get(resource, "0")) for node in snapshot.all("nodes")]
    most = max(offers, default=None)
    if most == 0 and "/" in resource:
        plugin = "kubectl get pods -A | grep -i device-plugin"
        return f"no node offers {resource}: is its device plugin running, does a node have a GPU?", (plugin,)
    lower = snapshot.upgrade(f"--set {_place(pod)}.resources.requests.{resource}=LESS")
    if "/" in resource:
        lower = snapshot.upgrade(f"--set {_place(pod)}.gpu.count=LESS")
    if most is not None and wanted > most:
        return f"it asks for {_human(wanted)} {resource}, and the largest node has {_human(most)}", (lower,)
    why = f"it asks for {_human(wanted)} {resource}; nodes have as much, but not free"
    return why, ("kubectl describe nodes | grep -A8 'Allocated resources'", lower)


def _claims(snapshot: ClusterSnapshot, pod: Object) -> Iterator[Finding]:
    named = {
        volume["persistentVolumeClaim"]["claimName"]
        for volume in pod["spec"].get("volumes") or ()
        if "persistentVolumeClaim" in volume
    }
    there = {name(claim): claim for claim in snapshot.all("persistentvolumeclaims")}
    for claim in sorted(named):
        if claim not in there:
            why = f"the claim {claim} does not exist"
            yield Finding(f"pod/{name(pod)}", "Pending", why, (snapshot.kubectl("get pvc"),))
        elif there[claim]["status"].get("phase") == "Pending":
            yield Finding(f"pvc/{claim}", "Pending", *_unbound(snapshot, there[claim]))


def _unbound(snapshot: ClusterSnapshot, claim: Object) -> tuple[str, tuple[str, ...]]:
    if why := snapshot.missing_class("StorageClass", claim["spec"].get("storageClassName")):
        return why, (snapshot.upgrade("--set …storage.storageClass=CLASS"),)
    events = snapshot.events("PersistentVolumeClaim", name(claim))
    message = events[-1]["message"] if events else "its provisioner has not answered"
    return message, (snapshot.kubectl(f"describe pvc {name(claim)}"),)


def _place(pod: Object) -> str:
    component = labels(pod).get(COMPONENT, "")
    return f"workers.pools.{labels(pod).get('ryzanstein.dev/pool', 'default')}" if component == "worker" else component


def _requested(container: Object, resource: str) -> float:
    resources = container.get("resources") or {}
    amounts = {**(resources.get("limits") or {}), **(resources.get("requests") or {})}
    return _quantity(amounts.get(resource, "0"))


def _quantity(text: str) -> float:
    suffix = str(text).lstrip("0123456789.")
    return float(str(text).removesuffix(suffix)) * _UNITS.get(suffix, 1)


def _human(number: float) -> str:
    return (
        f"{number / 2**30:.1f} GiB"
        if number >= 2**30
        else f"{number / 2**20:.0f} MiB"
        if number >= 2**20
        else f"{number:g}"
    )
