"""The guides' commands, run as they stand there, one after the other; each guide begins with nothing."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml

from tests.cluster.installation import Installation
from tests.cluster.kube import Kube, Object, client_pod
from tests.cluster.terminal import Terminal
from tests.commands import ROOT, CommandPlace, commands
from tests.programs import CHART, program

pytestmark = pytest.mark.timeout(900)
FILE = re.compile(r"<!-- file: (?P<name>\S+) -->\n```yaml\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
INSTALL = "kubectl create namespace llm; helm install ryzanstein charts/ryzanstein -n llm --wait --timeout 200s"
UPGRADED = """workers:
  defaults: {replicas: 2, resources: {requests: {cpu: 100m}}}
"""
NAMES = {"NAMESPACE": "llm", "RELEASE": "ryzanstein"}
CLAIM = {
    "apiVersion": "v1",
    "kind": "PersistentVolumeClaim",
    "metadata": {"name": "models"},
    "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "100Mi"}}},
}
# As much of a Prometheus operator as the page asks about: which monitors its Prometheus selects.
OPERATOR: Object = yaml.safe_load("""
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: prometheuses.monitoring.coreos.com}
spec:
  group: monitoring.coreos.com
  names: {kind: Prometheus, plural: prometheuses, singular: prometheus}
  scope: Namespaced
  versions:
    - name: v1
      served: true
      storage: true
      schema: {openAPIV3Schema: {type: object, x-kubernetes-preserve-unknown-fields: true}}
""")
PROMETHEUS: Object = yaml.safe_load("""
apiVersion: monitoring.coreos.com/v1
kind: Prometheus
metadata: {name: theirs}
spec: {podMonitorSelector: {matchLabels: {release: kube-prometheus-stack}}, podMonitorNamespaceSelector: {}}
""")


@pytest.fixture
def terminal(kubeconfig: Path, tmp_path: Path) -> Iterator[Terminal]:
    yield Terminal.open(tmp_path, kubeconfig, "llm")
    kubectl = program("kubectl")
    subprocess.run(
        [kubectl, "--kubeconfig", kubeconfig, "delete", "namespace", "llm", "--ignore-not-found"], check=True
    )


def follow(guide: Path, terminal: Terminal) -> list[str]:
    """Write the guide's files and run its commands; returns what each printed."""
    for file in FILE.finditer(guide.read_text()):
        (terminal.folder / file["name"]).write_text(file["text"])
    return [terminal.type(command.filled(NAMES)) for command in commands(guide, CommandPlace.CLUSTER)]


def test_the_deployment_guide(terminal: Terminal) -> None:
    assert len(follow(ROOT / "docs/deployment.md", terminal)) >= 5


def test_the_security_page(terminal: Terminal) -> None:
    terminal.type(INSTALL)
    assert len(follow(ROOT / "docs/security.md", terminal)) >= 3


def test_how_to_upgrade(terminal: Terminal, earlier_chart: Path) -> None:
    (terminal.folder / "llm.yaml").write_text(UPGRADED)
    earlier = f"{earlier_chart} -f llm.yaml --set image.tag=previous"
    terminal.type(INSTALL.replace("charts/ryzanstein", earlier))
    assert len(follow(CHART / "UPGRADING.md", terminal)) >= 4


def test_the_monitoring_page(terminal: Terminal, kubeconfig: Path) -> None:
    """Bundled, then, anew, with an operator; no second installation is started over the first."""
    terminal.type("kubectl create namespace llm")
    kube = Kube(kubeconfig, "llm")
    kube.apply(OPERATOR)
    kube.wait(f"crd/{OPERATOR['metadata']['name']}", condition="condition=Established")
    kube.apply(PROMETHEUS)
    installation = Installation(kube)
    try:
        for command in commands(ROOT / "docs/monitoring.md", CommandPlace.CLUSTER):
            if command.text.startswith("helm install"):
                terminal.type("helm uninstall ryzanstein --ignore-not-found --wait")
            shown = terminal.type(command.text)
            assert shown, command
            if command.text.startswith("helm install"):
                installation.wait_ready()
            if command.text.startswith("kubectl get prometheus"):
                assert "kube-prometheus-stack" in shown
    finally:
        kube.kubectl("delete", "crd", OPERATOR["metadata"]["name"])


def test_without_the_internet(terminal: Terminal, kubeconfig: Path) -> None:
    """As the profile stands its images cannot be pulled, and the doctor says so; with our names it serves."""
    terminal.type("kubectl create namespace llm; helm package charts/ryzanstein")
    kube = Kube(kubeconfig, "llm")
    bring_model(kube)
    profile = (CHART / "profiles/airgap.yaml").read_text()
    (terminal.folder / "airgap.yaml").write_text(profile)
    (install,) = commands(ROOT / "docs/air-gapped.md", CommandPlace.CLUSTER)
    assert terminal.run(install.text).returncode == 1, "nothing is ready yet"

    def named() -> bool:
        return "registry.example.com" in terminal.run(install.text.splitlines()[1]).stdout

    kube.until("doctor names the image", named, timeout_s=60, every_s=2)
    ours = {key: value for key, value in yaml.safe_load(profile).items() if key != "global"}  # nodes have the images
    (terminal.folder / "airgap.yaml").write_text(yaml.safe_dump(ours))
    terminal.type(install.text.splitlines()[0].replace("helm install", "helm upgrade"))
    installation = Installation(kube)
    installation.wait_ready()
    assert [each["id"] for each in httpx.get(f"{installation.url}/v1/models").json()["data"]] == ["my-model"]


def bring_model(kube: Kube) -> None:
    """The bundled model, on a claim."""
    copy = ("cp", "-rL", "/app/models/ryzanstein-tiny", "/mnt/models/my-model")
    pod = client_pod("copy", "worker-cpu", copy, {})
    pod["spec"]["securityContext"]["fsGroup"] = 10001
    pod["spec"]["volumes"] = [{"name": "models", "persistentVolumeClaim": {"claimName": "models"}}]
    pod["spec"]["containers"][0]["volumeMounts"] = [{"name": "models", "mountPath": "/mnt/models"}]
    kube.apply(CLAIM, pod)
    kube.wait("pod/copy", condition="jsonpath={.status.phase}=Succeeded")
