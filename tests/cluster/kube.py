"""kubectl and Helm as thin functions: each runs one command, and what fails says what the cluster saw."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from services.common.ports import free_port
from tests.programs import CHART, program, search_path
from tests.shell import captured

Object = dict[str, Any]

REPOSITORY = "ghcr.io/ryzanstein/ryzanstein"
NAME = "app.kubernetes.io/name=ryzanstein"
LOG_LINES = 40


class KubeCommandError(AssertionError):
    """A command ended with another status than 0; the text is what it wrote."""


def client_pod(name: str, target: str, command: tuple[str, ...], labels: dict[str, str]) -> Object:
    """A pod that any namespace takes, with the image that the chart's default values name for a target."""
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
    container = {
        "name": "main",
        "image": f"{REPOSITORY}:{target}-{version}",
        "command": list(command),
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    spec = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 0,
        "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [container],
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": labels}, "spec": spec}


@dataclass(frozen=True)
class Kube:
    """One namespace of a cluster."""

    kubeconfig: Path
    namespace: str

    def kubectl(self, *args: str, stdin: str = "", timeout_s: float = 60) -> str:
        """kubectl's standard output; raises KubeCommandError."""
        kubectl = program("kubectl")
        return self._run([kubectl, "--namespace", self.namespace, *args], stdin, timeout_s)

    def helm(self, *args: str, major: int = 3, timeout_s: float = 60) -> str:
        """The standard output of Helm of this major version; raises KubeCommandError."""
        command = [program(f"helm {major}"), "--namespace", self.namespace, *args]
        return self._run(command, "", timeout_s)

    def apply(self, *objects: Object, args: tuple[str, ...] = ()) -> str:
        """Create or change objects."""
        return self.kubectl("apply", *args, "-f", "-", stdin=yaml.safe_dump_all(objects))

    def get(self, kind: str, name: str) -> Object:
        """One object; raises KubeCommandError if it is not there."""
        items: Object = json.loads(self.kubectl("get", kind, name, "-o", "json"))
        return items

    def items(self, kinds: str, selector: str = "") -> list[Object]:
        """All objects of these kinds (comma-separated) with these labels."""
        items: list[Object] = json.loads(self.kubectl("get", kinds, "-l", selector, "-o", "json"))["items"]
        return items

    def pods(self, component: str, release: str = "ryzanstein") -> list[Object]:
        """A component's pods (gateway, router, coordinator, worker, redis, ...) that are not being deleted."""
        wanted = f"{NAME},app.kubernetes.io/instance={release},app.kubernetes.io/component={component}"
        return [pod for pod in self.items("pods", wanted) if "deletionTimestamp" not in pod["metadata"]]

    def exec(self, pod: str, *command: str, container: str = "", timeout_s: float = 60) -> str:
        """Run a command in a container; the pod's first one by default."""
        chosen = ("-c", container) if container else ()
        return self.kubectl("exec", pod, *chosen, "--", *command, timeout_s=timeout_s)

    def run(self, name: str, target: str, *command: str, labels: dict[str, str] | None = None) -> str:
        """Run a command to its end in a pod of its own, from the image of one of our targets; what it printed."""
        self.apply(client_pod(name, target, command, labels or {}))
        try:
            self.until(f"pod {name} has ended", lambda: self._ended(name))
            output = self.logs(name, "main")
            assert self.get("pod", name)["status"]["phase"] == "Succeeded", output
            return output
        finally:
            self.kubectl("delete", "pod", name, "--force", "--grace-period=0")

    @contextmanager
    def forward(self, service: str, port: int) -> Iterator[str]:
        """`kubectl port-forward` to a Service; yields the URL."""
        kubectl = program("kubectl")
        command = [kubectl, "--kubeconfig", str(self.kubeconfig), "-n", self.namespace]
        local = free_port()
        command += ["port-forward", f"service/{service}", f"{local}:{port}"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout
                assert "Forwarding" in process.stdout.readline()
                yield f"http://127.0.0.1:{local}"
            finally:
                process.terminate()

    def _ended(self, pod: str) -> bool:
        return self.get("pod", pod)["status"]["phase"] in ("Succeeded", "Failed")

    def logs(self, pod: str, container: str = "", previous: bool = False) -> str:
        """A container's log, or that of the container that ran before its last restart."""
        chosen = ("-c", container) if container else ("--all-containers", "--prefix")
        return self.kubectl("logs", pod, *chosen, *(("--previous",) if previous else ()))

    def wait(self, *what: str, condition: str, timeout_s: float = 180) -> None:
        """``kubectl wait --for``: e.g. ``wait("job/x", condition="condition=Complete")``."""
        self.kubectl("wait", *what, f"--for={condition}", f"--timeout={timeout_s:.0f}s", timeout_s=timeout_s + 10)

    def rolled_out(self, *what: str, timeout_s: float = 300) -> None:
        """Return once these Deployments and StatefulSets run their newest revision, all replicas ready."""
        for workload in what:
            self.kubectl("rollout", "status", workload, f"--timeout={timeout_s:.0f}s", timeout_s=timeout_s + 10)

    def until(self, what: str, condition: Callable[[], bool], timeout_s: float = 180, every_s: float = 0.2) -> None:
        """Return once the condition holds; raises AssertionError that names `what`."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline:
                raise AssertionError(f"not within {timeout_s} s: {what}")
            time.sleep(every_s)

    def restarts(self) -> dict[str, int]:
        """How often each container (``pod/container``) of the namespace was restarted."""
        return {
            f"{pod['metadata']['name']}/{status['name']}": int(status["restartCount"])
            for pod in self.items("pods")
            for status in pod["status"].get("containerStatuses", ())
        }

    def report(self) -> str:
        """A report for a failure: pods, events, and logs of pods that are not ready."""
        parts = [
            self._shown("get", "pods", "-o", "wide"),
            self._shown("get", "deployments,statefulsets,jobs,persistentvolumeclaims"),
            self._shown("get", "events", "--sort-by=.lastTimestamp"),
        ]
        for pod in self.items("pods"):
            name = pod["metadata"]["name"]
            for status in pod["status"].get("containerStatuses", ()):
                parts += self._troubled(name, status)
        return "\n".join(parts)

    def _troubled(self, pod: str, status: Object) -> list[str]:
        tail = ("-c", status["name"], f"--tail={LOG_LINES}")
        shown = [] if status["ready"] else [self._shown("logs", pod, *tail)]
        return shown + ([self._shown("logs", pod, "--previous", *tail)] if status["restartCount"] else [])

    def _shown(self, *args: str) -> str:
        try:
            output = self.kubectl(*args)
        except KubeCommandError as error:
            output = str(error)
        return f"== kubectl {' '.join(args)}\n{output}"

    def _run(self, command: list[str], stdin: str, timeout_s: float) -> str:
        environment = {**os.environ, "PATH": search_path(), "KUBECONFIG": str(self.kubeconfig)}
        try:
            done = captured(command, input=stdin, env=environment, timeout=timeout_s)
        except subprocess.TimeoutExpired as error:
            raise KubeCommandError(f"{' '.join(command)}: not done after {timeout_s} s") from error
        if done.returncode:
            raise KubeCommandError(f"{' '.join(command)}: status {done.returncode}\n{done.stderr}{done.stdout}")
        return done.stdout
