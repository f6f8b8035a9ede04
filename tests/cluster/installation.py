"""The product, installed by Helm."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.in_pods import METRICS
from tests.cluster.kube import Kube, Object
from tests.programs import CHART

RELEASE = "ryzanstein"
PASSWORD = "/etc/ryzanstein/redis/current/password"
READY_S = 150
TINY_MODEL = "file:///app/models/ryzanstein-tiny"


@dataclass(frozen=True)
class Installation:
    """One release in one namespace."""

    kube: Kube
    release: str = RELEASE
    model: str = TINY_MODEL  # "": the chart's own

    @property
    def url(self) -> str:
        """Where clients of the tests reach the gateway: its Service's address."""
        gateways = f"app.kubernetes.io/instance={self.release},app.kubernetes.io/component=gateway"
        services = self.kube.items("services", gateways)
        (address,) = (each["spec"]["clusterIP"] for each in services if each["metadata"]["name"].endswith("-gateway"))
        return f"http://{address}"

    def begin(self, *args: str, major: int = 3, chart: Path = CHART) -> None:
        """`helm upgrade --install`; `args` outweigh what all installations of the tests have."""
        self.kube.helm("upgrade", "--install", self.release, str(chart), *self.common(chart), *args, major=major)

    def common(self, chart: Path) -> list[str]:
        """Options for Helm: the tiny model, and no Grafana, whose image no node of the rig has."""
        model = [f"--set=workers.defaults.model={self.model}"] if self.model else []
        has_grafana = "\n  grafana:" in (chart / "values.yaml").read_text()
        return model + (["--set=monitoring.grafana.enabled=false"] if has_grafana else [])

    def install(self, *args: str, major: int = 3, chart: Path = CHART) -> float:
        """The same; returns the seconds until every pod is ready."""
        began = time.monotonic()
        self.begin(*args, major=major, chart=chart)
        self.wait_ready()
        return time.monotonic() - began

    def wait_ready(self, timeout_s: float = READY_S) -> None:
        """Return once every workload of the release runs its newest revision, all replicas ready."""
        self.kube.rolled_out(*self.workloads(), timeout_s=timeout_s)

    def workloads(self) -> list[str]:
        """As `kubectl rollout` names them."""
        items = self.kube.items("deployments,statefulsets", f"app.kubernetes.io/instance={self.release}")
        return [f"{item['kind'].lower()}/{item['metadata']['name']}" for item in items]

    def pods(self, component: str) -> list[Object]:
        """A component's pods."""
        return self.kube.pods(component, self.release)

    def metric(self, pod: Object, series: str) -> float:
        """The sum of a pod's samples whose names and labels begin so."""
        lines = self.kube.exec(pod["metadata"]["name"], "python", "-c", METRICS).splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(series))

    def redis(self, command: str) -> str:
        """The bundled Redis's answer to a command."""
        talk = f'printf "auth %s\\n%s\\n" "$(cat {PASSWORD})" "$1" | redis-cli -s /tmp/redis.sock'
        answers = self.kube.exec(self.pod("redis")["metadata"]["name"], "sh", "-c", talk, "sh", command)
        first, _, rest = answers.partition("\n")
        assert first == "OK", answers
        return rest.rstrip("\n")

    def pod(self, component: str) -> Object:
        """The first of them."""
        return self.pods(component)[0]

    def delete(self, *pods: Object, force: bool = False) -> None:
        """Ask for their end, or have them killed at once."""
        how = ("--force", "--grace-period=0") if force else ("--wait=false",)
        self.kube.kubectl("delete", "pod", *(pod["metadata"]["name"] for pod in pods), *how)

    def restart(self, component: str) -> None:
        """Begin a rollout of the component's workload."""
        self.kube.kubectl("rollout", "restart", self.workload(component))

    def patch(self, component: str, change: Object) -> None:
        """Change a component's workload behind Helm's back."""
        self.kube.kubectl("patch", self.workload(component), "--type=strategic", "--patch", json.dumps(change))

    def workload(self, component: str) -> str:
        """As `kubectl rollout` names it."""
        (workload,) = [name for name in self.workloads() if f"-{component}" in name]
        return workload
