"""A training as a Kubernetes Job: what is asked for, and what its status says."""

from __future__ import annotations

import copy
from collections.abc import Sequence

from services.finetuner.cluster.api import Object
from services.finetuner.runner import TrainingOutcome, TrainingTask

MEMBER = "ryzanstein.dev/fine-tuning-job"  # annotation: the job, as `TrainingTask.member` names it
# In the command line of the pod: Kubernetes puts the Job's UID there, from a variable of the template.
_UID = "$(JOB_UID)"
# The labels that a release's Jobs have in all its versions.
_SELECT = ("app.kubernetes.io/name", "app.kubernetes.io/instance", "app.kubernetes.io/component")
_STARTING = ("ContainerCreating", "PodInitializing")


def name_of(template: Object, job_id: str) -> str:
    """The name of a job's Kubernetes Job."""
    return f"{template['metadata']['name']}-{job_id.removeprefix('ftjob-')}"


def selector(template: Object) -> dict[str, str]:
    """The labels of all Jobs that were made from the template, or from an earlier version of it."""
    return {name: template["metadata"]["labels"][name] for name in _SELECT}


def build(template: Object, task: TrainingTask, arguments: Sequence[str], owner_uid: str) -> Object:
    """The Kubernetes Job of a training, which goes when the object that the template names as its owner goes."""
    job = copy.deepcopy(template)
    metadata = job["metadata"]
    metadata["name"] = name_of(template, task.job_id)
    metadata["annotations"] = {**metadata.get("annotations", {}), MEMBER: task.member}
    for owner in metadata["ownerReferences"]:
        owner["uid"] = owner_uid
    [container] = job["spec"]["template"]["spec"]["containers"]
    container["args"] = [*arguments, str(task.folder / "words" / f"{_UID}.jsonl")]
    return job


def ended(job: Object) -> Object | None:
    """The condition that says that a Job has ended, if it has."""
    conditions = job.get("status", {}).get("conditions") or ()
    return next((one for one in conditions if one["type"] in ("Complete", "Failed") and one["status"] == "True"), None)


def runs(job: Object) -> bool:
    """Whether a pod of it runs."""
    return bool(job.get("status", {}).get("ready"))


def waiting(pods: Sequence[Object]) -> str:
    """Why the newest pod has not started; empty if it has, or if nothing is known to hold it up."""
    if not pods or pods[-1]["status"].get("phase") != "Pending":
        return ""
    status = pods[-1]["status"]
    for condition in status.get("conditions") or ():
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return f"No node takes the training's pod: {condition.get('message', '')}"
    for container in status.get("containerStatuses") or ():
        held = container["state"].get("waiting", {})
        if held.get("reason", _STARTING[0]) not in _STARTING:
            return f"The training's pod does not start: {held['reason']}: {held.get('message', '')}"
    return ""


def outcome(condition: Object, pods: Sequence[Object]) -> TrainingOutcome:
    """How a Job ended: as the last of its pods that ended, or as the Job says if none is left."""
    if condition["type"] == "Complete":
        return TrainingOutcome(0, "")
    for pod in reversed(pods):
        for container in pod["status"].get("containerStatuses") or ():
            if end := container["state"].get("terminated"):
                lines = [line for line in end.get("message", "").splitlines() if line.strip()]
                reasons = [end.get("reason", ""), pod["status"].get("reason", ""), *lines[-1:]]
                return TrainingOutcome(end["exitCode"], ": ".join(filter(None, reasons)))
        if reason := pod["status"].get("reason"):
            return TrainingOutcome(-1, f"{reason}: {pod['status'].get('message', '')}")
    return TrainingOutcome(-1, f"{condition.get('reason', '')}: {condition.get('message', '')}")
