"""Finds controllers that cannot create pods, rollouts that are stuck, and failed jobs."""

from __future__ import annotations

import re
from collections.abc import Iterator

from services.cli.kube.diagnosis.finding import Finding
from services.cli.kube.diagnosis.snapshot import ClusterSnapshot, Object, is_ready, labels, name, releases

_MAKERS = (("statefulsets", "StatefulSet"), ("replicasets", "ReplicaSet"), ("jobs", "Job"))


def findings(snapshot: ClusterSnapshot) -> Iterator[Finding]:
    """Findings about the release's controllers."""
    if not snapshot.own("pods") and not snapshot.own("deployments") and not snapshot.own("statefulsets"):
        yield _nothing(snapshot)
        return
    for plural, kind in _MAKERS:
        for maker in snapshot.own(plural):
            yield from _not_made(snapshot, kind, maker)
    for wanted in snapshot.own("statefulsets"):
        yield from _stuck(snapshot, wanted)
    for job in snapshot.own("jobs"):
        if any(each["type"] == "Failed" and each["status"] == "True" for each in job["status"].get("conditions") or ()):
            do = (
                snapshot.kubectl(f"logs job/{name(job)}"),
                snapshot.kubectl(f"delete job {name(job)}"),
                "then the same helm upgrade again",
            )
            yield Finding(f"job/{name(job)}", "failed", "it did not make the secrets in ten attempts", do)
    for scaler in snapshot.own("horizontalpodautoscalers"):
        yield from _blind(snapshot, scaler)


def _nothing(snapshot: ClusterSnapshot) -> Finding:
    others = releases(snapshot.all("pods"))
    there = f"; releases here: {', '.join(others)}" if others else ""
    return Finding(
        f"release/{snapshot.release}",
        "not there",
        f"namespace {snapshot.namespace} has nothing of a release {snapshot.release}{there}",
        ("helm list -A", "ryzanstein kube doctor --namespace NAMESPACE --release RELEASE"),
    )


def _not_made(snapshot: ClusterSnapshot, kind: str, maker: Object) -> Iterator[Finding]:
    """A controller whose pods a quota, Pod Security or a webhook refuses: the pods do not even become Pending."""
    wanted = maker["spec"].get("replicas", maker["spec"].get("completions", 1))
    if wanted <= maker["status"].get("replicas", maker["status"].get("succeeded", 0)):
        return
    failures = [each for each in snapshot.events(kind, name(maker)) if each.get("reason") == "FailedCreate"]
    if not failures:
        return
    message = failures[-1]["message"]
    do: tuple[str, ...] = (snapshot.kubectl(f"describe {kind.lower()} {name(maker)}"),)
    why = "its pods are refused"
    if "exceeded quota" in message:
        why, do = "the namespace's quota is used up", (snapshot.kubectl("describe resourcequota"), *do)
    elif "violates PodSecurity" in message:
        why = "the namespace's Pod Security refuses its pods"
        do = (f"kubectl get namespace {snapshot.namespace} --show-labels", *do)
    yield Finding(f"{kind.lower()}/{name(maker)}", "no pods", f"{why}: {message}", do)


def _stuck(snapshot: ClusterSnapshot, wanted: Object) -> Iterator[Finding]:
    """Pods that block a rollout: a StatefulSet does not replace a pod that is not ready, even by a corrected one."""
    status = wanted["status"]
    newest = status.get("updateRevision")
    if not newest or newest == status.get("currentRevision"):
        return
    for pod in snapshot.own("pods"):
        owners = [owner["name"] for owner in pod["metadata"].get("ownerReferences") or ()]
        if name(wanted) in owners and labels(pod).get("controller-revision-hash") != newest and not is_ready(pod):
            why = "it is not ready and of an old revision: its set waits for it before it goes on"
            yield Finding(f"pod/{name(pod)}", "stuck in a rollout", why, (snapshot.kubectl(f"delete pod {name(pod)}"),))


def _blind(snapshot: ClusterSnapshot, scaler: Object) -> Iterator[Finding]:
    for condition in scaler["status"].get("conditions") or ():
        if (
            condition["type"] == "ScalingActive"
            and condition["status"] == "False"
            and condition.get("reason") != "ScalingDisabled"
        ):
            text = condition.get("message", "")
            do = "kubectl top pods" if re.search("resource metric|cpu utilization", text) else "see keda.prometheusUrl"
            yield Finding(
                f"hpa/{name(scaler)}", "not scaling", text, (snapshot.kubectl(f"describe hpa {name(scaler)}"), do)
            )
