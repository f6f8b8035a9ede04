"""Kubernetes' API for trainings: Jobs, pods and a Deployment. The test plays controllers and kubelets."""

from __future__ import annotations

from typing import Any

from tests.kube_api import KubeApi, Object

OWNER, OWNER_UID = "ryzanstein-finetuner", "uid-of-the-owner"


class FaultyApi(KubeApi):
    """The namespace, and what goes wrong with requests."""

    def __init__(self) -> None:
        super().__init__()
        self.refuse: list[tuple[str, int, str]] = []  # as "GET jobs/name"; status and body, once each
        self.put("deployments", {"metadata": {"name": OWNER, "uid": OWNER_UID}})

    @property
    def jobs(self) -> list[Object]:
        return [actual for (kind, _), actual in self.objects.items() if kind == "jobs"]

    @property
    def made(self) -> int:
        """How many Jobs there have been."""
        return self.kept["jobs"]

    @property
    def looks(self) -> int:
        """How often somebody looked at a Job."""
        return sum(each.startswith("GET jobs/") for each in self.asked)

    def job(self) -> Object:
        """The only Job."""
        [job] = self.jobs
        return job

    def set_pod(self, phase: str, *, name: str = "pod", **status: Any) -> None:
        """Set the status of the Job's pod `name`; a new one is younger than those before."""
        labels = {"batch.kubernetes.io/job-name": self.job()["metadata"]["name"]}
        self.objects.pop(("pods", name), None)
        self.put("pods", {"metadata": {"name": name, "labels": labels}, "status": {"phase": phase, **status}})
        self.job()["status"]["ready"] = int(phase == "Running")

    def end_job(self, kind: str, **reason: str) -> None:
        """Give the Job its last condition."""
        self.job()["status"] = {"conditions": [{"type": kind, "status": "True", **reason}]}

    def being_deleted(self) -> None:
        """Have the Job wait for its pods, as one does that was deleted in the foreground."""
        self.job()["metadata"]["deletionTimestamp"] = "2026-01-01T00:01:00Z"

    def delete(self, name: str) -> None:
        """Take a Job away, and all pods."""
        del self.objects["jobs", name]
        for each in [each for each in self.objects if each[0] == "pods"]:
            del self.objects[each]

    def answer(self, verb: str, kind: str, name: str, body: Object | None, selector: str) -> tuple[int, Object | str]:
        asks = f"{verb.replace('LIST', 'GET')} {'/'.join(filter(None, (kind, name)))}"
        for refusal in self.refuse:
            if refusal[0] == asks:
                self.refuse.remove(refusal)
                return refusal[1:]
        status, answer = super().answer(verb, kind, name, body, selector)
        if (verb, kind, status) == ("POST", "jobs", 201):
            job = self.job()
            job["status"] = {}
            [container] = job["spec"]["template"]["spec"]["containers"]
            uid = job["metadata"]["uid"]
            container["args"] = [each.replace("$(JOB_UID)", uid) for each in container["args"]]  # as kubelets do
        if (verb, kind, status) == ("DELETE", "jobs", 200):
            self.objects = {each: actual for each, actual in self.objects.items() if each[0] != "pods"}
        return status, answer
