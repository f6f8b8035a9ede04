"""Finds pods that are Pending, wait, restart, or run without being ready."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace

from services.cli.kube.diagnosis.finding import Finding
from services.cli.kube.diagnosis.scheduling import unschedulable
from services.cli.kube.diagnosis.snapshot import COMPONENT, ClusterSnapshot, Object, is_ready, labels, name

_PULL = ("ImagePullBackOff", "ErrImagePull", "InvalidImageName", "ErrImageNeverPull")
_STEADY_S = 300.0  # Kubernetes's longest delay between two restarts
_OOM, _KILLED = "OOMKilled", 137
_MEMORY_LIMIT = re.compile(r"set the container's memory limit to ([\d,]+) MiB")  # logged before loading
# Secrets that the chart's Job makes, by a part of their names.
_REDIS_PASSWORDS = {
    "redis-auth": ("password",),
    "redis-users": ("gateway", "router", "coordinator", "worker", "finetuner"),
}
# The condition for each service to be ready.
_READY_WHEN = {
    "gateway": "a router has answered, and a worker of those that serve",
    "router": "Redis has been read once",
    "coordinator": "Redis has been read once",
    "worker": "the model is loaded and Redis has been written once",
    "redis": "it answers a ping",
}


def findings(snapshot: ClusterSnapshot) -> Iterator[Finding]:
    """Findings about every pod of the release that is neither ready nor done."""
    for pod in snapshot.own("pods"):
        status = pod.get("status", {})
        if status.get("phase") == "Succeeded":
            continue
        if status.get("phase") == "Failed":
            yield _failed(snapshot, pod)
        elif pod["metadata"].get("deletionTimestamp"):
            continue
        elif not _scheduled(pod):
            yield from unschedulable(snapshot, pod)
        else:
            yield from _of_containers(snapshot, pod)


def _scheduled(pod: Object) -> bool:
    return bool(pod["spec"].get("nodeName")) or "False" not in [
        condition["status"]
        for condition in pod["status"].get("conditions") or ()
        if condition["type"] == "PodScheduled"
    ]


def _failed(snapshot: ClusterSnapshot, pod: Object) -> Finding:
    status = pod["status"]
    reason = status.get("reason") or "it ended with an error"
    return Finding(
        f"pod/{name(pod)}",
        "failed",
        f"{reason}: {status.get('message', 'see its log')}",
        (snapshot.kubectl(f"logs {name(pod)}"), snapshot.kubectl(f"delete pod {name(pod)}")),
    )


def _of_containers(snapshot: ClusterSnapshot, pod: Object) -> Iterator[Finding]:
    status = pod["status"]
    containers = [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]
    findings = [finding for container in containers for finding in _of_container(snapshot, pod, container)]
    yield from findings
    if is_ready(pod) or not all(finding.harmless for finding in findings):
        return
    mounts = [
        event
        for event in snapshot.events("Pod", name(pod))
        if event.get("reason") in ("FailedMount", "FailedAttachVolume")
    ]
    if mounts and not any(each.get("started") for each in status.get("containerStatuses") or ()):
        yield _not_mounted(snapshot, pod, mounts[-1]["message"])
    elif _all_run(status):
        yield _not_ready(snapshot, pod)


def _all_run(status: Object) -> bool:
    containers: list[Object] = status.get("containerStatuses") or []
    return bool(containers) and all("running" in each.get("state", {}) for each in containers)


def _of_container(snapshot: ClusterSnapshot, pod: Object, container: Object) -> Iterator[Finding]:
    waiting = container.get("state", {}).get("waiting", {})
    reason, message = waiting.get("reason", ""), waiting.get("message", "")
    if reason in _PULL:
        yield _not_pulled(snapshot, pod, container, message)
    elif reason == "CreateContainerConfigError":
        yield _not_configured(snapshot, pod, message)
    elif reason == "CrashLoopBackOff" or container.get("restartCount", 0) > 0:
        finding = _restarting(snapshot, pod, container)
        yield (
            replace(finding, what="well again, and was restarting", harmless=True)
            if _steady(snapshot, container)
            else finding
        )
    elif container["name"] == "fetch" and "running" in container.get("state", {}):
        yield Finding(
            f"pod/{name(pod)}",
            "not ready",
            "its model is being fetched; that takes as long as its size over the network's speed",
            (snapshot.kubectl(f"logs {name(pod)} -c fetch --tail=3"),),
        )


def _steady(snapshot: ClusterSnapshot, container: Object) -> bool:
    """Whether a container that has restarted works again, or has succeeded."""
    state = container.get("state", {})
    if "terminated" in state:
        return bool(state["terminated"].get("exitCode") == 0)
    running = state.get("running", {})
    return bool(container.get("ready") and running) and snapshot.seconds_since(running["startedAt"]) > _STEADY_S


def _not_pulled(snapshot: ClusterSnapshot, pod: Object, container: Object, message: str) -> Finding:
    image = container["image"]
    events = [
        event["message"] for event in snapshot.events("Pod", name(pod)) if "pull" in event.get("message", "").lower()
    ]
    error = next((text for text in reversed(events) if "Back-off" not in text), message)
    if re.search(r"401|403|unauthorized|denied|authentication", error, re.IGNORECASE):
        why, do = (
            "the registry wants a password",
            snapshot.upgrade('--set-json \'global.imagePullSecrets=[{"name":"SECRET"}]\''),
        )
    elif re.search(r"not found|manifest unknown|404", error, re.IGNORECASE):
        why, do = "the registry has no such image", snapshot.upgrade("--set image.tag=TAG")
    else:
        why, do = "the registry is not reached", snapshot.upgrade("--set global.imageRegistry=MIRROR")
    return Finding(f"pod/{name(pod)}", "Pending", f"the image {image} can't be pulled, {why}: {error}", (do,))


def _not_configured(snapshot: ClusterSnapshot, pod: Object, message: str) -> Finding:
    return Finding(
        f"pod/{name(pod)}",
        "Pending",
        f"its container can't be made: {message}",
        (*_for_missing(snapshot, message), snapshot.kubectl(f"describe pod {name(pod)}")),
    )


def _not_mounted(snapshot: ClusterSnapshot, pod: Object, message: str) -> Finding:
    if "Multi-Attach" in message:
        do = ("ReadWriteOnce serves one node: set storage.accessModes to [ReadWriteMany], or storage.type to perPod",)
        return Finding(f"pod/{name(pod)}", "Pending", f"its volume is used on another node: {message}", do)
    return Finding(
        f"pod/{name(pod)}", "Pending", f"a volume can't be mounted: {message}", _for_missing(snapshot, message)
    )


def _for_missing(snapshot: ClusterSnapshot, message: str) -> tuple[str, ...]:
    """Commands that create the missing Secret of an error message."""
    secret = re.search(r'secret "([^"]+)" not found', message)
    if not secret:
        return ()
    for kind, keys in _REDIS_PASSWORDS.items():
        if kind in secret[1]:
            passwords = " ".join(f'--from-literal={key}="$(openssl rand -hex 32)"' for key in keys)
            return (
                snapshot.kubectl("get jobs,pods -l app.kubernetes.io/component=secrets"),
                snapshot.kubectl(f"create secret generic {secret[1]} {passwords}"),
            )
    return (snapshot.kubectl(f"create secret generic {secret[1]} --from-literal=KEY=VALUE"),)


def _restarting(snapshot: ClusterSnapshot, pod: Object, container: Object) -> Finding:
    last = container.get("lastState", {}).get("terminated") or container.get("state", {}).get("terminated") or {}
    times, which = container.get("restartCount", 0), f"pod/{name(pod)}"
    logs = snapshot.kubectl(f"logs {name(pod)} -c {container['name']} --previous --tail=20")
    killed = [
        event["message"]
        for event in snapshot.events("Pod", name(pod))
        if re.search(r"failed (liveness|startup) probe", event.get("message", ""))
    ]
    if last.get("reason") == _OOM:
        limit = _limit(pod, container["name"])
        why, do = f"killed for memory at its limit of {limit}", _raise_memory(snapshot, pod, "SIZE")
        return Finding(which, "restarting", f"{why} ({times} times)", (do, logs))
    if killed and "startup" in killed[-1]:
        do = _value(pod, "startupBudgetSeconds=SECONDS") if labels(pod).get(COMPONENT) == "worker" else logs
        why = "it did not start within its budget"
        return Finding(
            which, "restarting", f"{why} ({times} times)", (snapshot.upgrade(f"--set {do}") if "=" in do else do, logs)
        )
    if killed:
        return Finding(which, "restarting", f"it did not answer its liveness probe for 30 s ({times} times)", (logs,))
    code = last.get("exitCode", "unknown")
    why = f"its process ends with status {code}" + (", killed from outside" if code == _KILLED else "")
    words = _last_words(last.get("message") or "")
    needed = _MEMORY_LIMIT.search(words)
    raised = (_raise_memory(snapshot, pod, f"{needed[1].replace(',', '')}Mi"),) if needed else ()
    return Finding(which, "restarting", f"{why} ({times} times)" + (f": {words}" if words else ""), (*raised, logs))


def _last_words(log: str) -> str:
    """The last line of a log's end, which Kubernetes keeps for a container that ended with an error."""
    line = next((line for line in reversed(log.splitlines()) if line.strip()), "")
    try:
        return str(json.loads(line)["message"])
    except (ValueError, TypeError, KeyError):
        return line.strip()


def _limit(pod: Object, container: str) -> str:
    (spec,) = [each for each in pod["spec"]["containers"] if each["name"] == container] or [{}]
    return str(spec.get("resources", {}).get("limits", {}).get("memory", "the node"))


def _raise_memory(snapshot: ClusterSnapshot, pod: Object, size: str) -> str:
    return snapshot.upgrade(f"--set {_value(pod, f'resources.limits.memory={size}')}")


def _value(pod: Object, value: str) -> str:
    """The path of a chart value for the pod's component."""
    component = labels(pod).get(COMPONENT, "")
    place = f"workers.pools.{labels(pod).get('ryzanstein.dev/pool', 'default')}" if component == "worker" else component
    return f"{place}.{value}"


def _not_ready(snapshot: ClusterSnapshot, pod: Object) -> Finding:
    component = labels(pod).get(COMPONENT, "")
    waits = f"it is ready when {_READY_WHEN[component]}" if component in _READY_WHEN else "its readiness probe fails"
    events = [event["message"] for event in snapshot.events("Pod", name(pod)) if event.get("reason") == "Unhealthy"]
    probe = f"; the kubelet says: {events[-1]}" if events else ""
    others = [each for each in ("redis", "router") if not any(map(is_ready, snapshot.own("pods", each)))]
    missing = f"; not ready itself: {', '.join(others)}" if others and component not in others else ""
    return Finding(
        f"pod/{name(pod)}", "not ready", f"{waits}{missing}{probe}", (snapshot.kubectl(f"logs {name(pod)} --tail=20"),)
    )
