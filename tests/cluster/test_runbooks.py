"""Every command of a page for a running installation works, and finds something."""

from __future__ import annotations

import json
import os
import re
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.cluster.conftest import Namespaces, settings
from tests.cluster.installation import Installation
from tests.cluster.prometheus import Prometheus
from tests.cluster.terminal import Terminal
from tests.commands import PAGES, Command, CommandPlace, commands, expressions

pytestmark = pytest.mark.timeout(400)
# These begin with nothing; test_documents.py follows them.
GUIDES = {"deployment", "security", "UPGRADING", "monitoring", "air-gapped"}
FOLLOWED = [
    page for page in PAGES if page.stem not in GUIDES and (commands(page, CommandPlace.CLUSTER) or expressions(page))
]
VALUES: dict[str, object] = {
    "workers.defaults.replicas": 2,
    "workers.defaults.resources.requests.cpu": "50m",
    "router.replicas": 2,
    "gateway.settings.logPrompts": "true",
}
# Preparations for the pages that need some.
PLANTED: dict[str, dict[str, object]] = {
    "pods": {"workers.pools.fetched.model": "hf://nobody/nothing"},
    "autoscaling": {
        "gateway.autoscaling.mode": "hpa-cpu",
        "workers.pools.scaled.servedName": "scaled",
        "workers.pools.scaled.autoscaling.mode": "keda",
    },
    "ingress-timeouts": {"ingress.enabled": "true", "ingress.controller": "traefik", "ingress.className": "traefik"},
}
POOLS = {"autoscaling": "scaled"}
# Pages with a worker's container that was restarted after it had lost a rank.
RESTARTED = {"pods", "poison-requests"}
LOSE_RANKS = """
import os, pathlib, signal
for process in pathlib.Path("/proc").glob("[0-9]*"):
    if b"-m\\0services.worker.rank\\0" in (process / "cmdline").read_bytes() and os.getpid() != int(process.name):
        os.kill(int(process.name), signal.SIGKILL)
"""
TAINT = "nvidia.com/gpu"
# After these the installation is put back.
CHANGES = re.compile(r"rollout restart|rollback|scale|cordon|taint|drain-worker|delete")
# Expected output of commands, where any output is not enough.
SHOWS = {
    "kubectl -n NAMESPACE get scaledobject,hpa": r"scaledobject.*workers-scaled(?s:.*)horizontalpodautoscaler.*gateway",
    "kubectl -n NAMESPACE get hpa": r"cpu: \d+%",
    "kubectl -n NAMESPACE get job -l app.kubernetes.io/component=secrets": r"Complete|1/1",
    "kubectl -n NAMESPACE logs POD -c fetch": r"nobody/nothing",
    "kubectl -n NAMESPACE get ingress -o yaml": r"ingressClassName: traefik",
    "kubectl describe node NODE": r"Allocatable:",
    "kubectl get pdb -n NAMESPACE": r"workers",
    "kubectl exec POD -- env | grep tcp://": r"KUBERNETES_PORT=tcp",
    "ryzanstein trace REQUEST_ID": r"worker\.decode",
    "kubectl -n NAMESPACE port-forward service/RELEASE-jaeger 16686 &": r"worker\.decode",
    "pods: ryzanstein kube doctor -n NAMESPACE": r"workers-fetched",
    "gpu-nodes: ryzanstein kube doctor": r"\S",  # the second time the node is taken out, which is a finding
    "ryzanstein kube status": r"workers-default-1",
    "helm -n NAMESPACE history RELEASE": r"deployed",
}
# In an installation that is well these find nothing: what is looked for instead.
INSTEAD = {
    """kubectl -n NAMESPACE logs -l app.kubernetes.io/component=gateway --tail=-1 | grep '"level": "error"'""": (
        '"error"',
        '"info"',
    ),
    # tests/chaos/test_poison.py sees the line.
    "kubectl -n NAMESPACE logs -l app.kubernetes.io/component=gateway --tail=-1 | grep poison": ("poison", "prompt"),
}


@pytest.fixture(scope="module")
def operated(namespaces: Namespaces) -> Installation:
    installation = Installation(namespaces("operated"))
    installation.install(*settings(VALUES), "--set=logLevel=debug")
    installation.install(*settings(VALUES), "--reset-values")  # something to go back from
    kube = installation.kube
    kube.until("pods are measured", lambda: "gateway" in kube.kubectl("top", "pods"), timeout_s=90, every_s=2)
    return installation


@pytest.fixture(scope="module")
def terminal(operated: Installation, tmp_path_factory: pytest.TempPathFactory) -> Terminal:
    folder = tmp_path_factory.mktemp("terminal")
    return Terminal.open(folder, operated.kube.kubeconfig, operated.kube.namespace)


@pytest.fixture
def planted(operated: Installation, page: Path) -> Iterator[Installation]:
    """The installation with what a page is about; afterwards as it was."""
    kube, extra = operated.kube, PLANTED.get(page.stem, {})
    if extra:
        operated.begin(*settings({**VALUES, **extra}), "--reset-values")
    for pool in {name.split(".")[2] for name in extra if name.startswith("workers.pools.")}:
        kube.until(f"pool {pool}", lambda pool=pool: bool(kube.items("pods", f"ryzanstein.dev/pool={pool}")))
    if page.stem in RESTARTED:
        restart_after_a_loss(operated)
    yield operated
    if page.stem in RESTARTED:  # the next doctor would ask why
        kube.kubectl("delete", "pod", "ryzanstein-workers-default-0", timeout_s=180)
    if extra or any(CHANGES.search(command.text) for command in commands(page, CommandPlace.CLUSTER)):
        for node in kube.items("nodes"):
            kube.kubectl("uncordon", node["metadata"]["name"])
            if TAINT in json.dumps(node["spec"].get("taints")):
                kube.kubectl("taint", "node", node["metadata"]["name"], f"{TAINT}-")
        operated.begin(*settings(VALUES), "--reset-values")
        kube.kubectl("scale", "statefulset/ryzanstein-workers-default", "--replicas=2")
    operated.wait_ready()
    ask(operated)


def restart_after_a_loss(installation: Installation) -> None:
    """A worker loses its rank, recovers, and is then ended and started again in its pod."""
    kube, pool = installation.kube, "ryzanstein-workers-default"
    name = f"{pool}-0"
    before = kube.restarts()[f"{name}/worker"]
    kube.exec(name, "python", "-c", LOSE_RANKS)
    kube.until("the loss is logged", lambda: "ranks lost" in kube.logs(name))
    kube.exec(name, "python", "-c", "import os, signal; os.kill(1, signal.SIGTERM)")
    kube.until("the container is new", lambda: kube.restarts().get(f"{name}/worker", 0) > before)
    kube.rolled_out(f"statefulset/{pool}")  # another pool's model cannot be fetched


def ask(installation: Installation) -> str:
    """A request that is traced, and served; its id."""
    request_id = f"typed-{secrets.token_hex(4)}"
    headers = {"x-request-id": request_id, "traceparent": f"00-{os.urandom(16).hex()}-{os.urandom(8).hex()}-01"}
    body = {"model": "ryzanstein-tiny", "prompt": "def fibonacci(n):\n" * 8, "max_tokens": 8}
    answer = httpx.post(f"{installation.url}/v1/completions", json=body, headers=headers, timeout=60)
    assert answer.is_success, answer.text
    return request_id


def pod(installation: Installation, command: Command) -> str:
    """The pod that a command is about."""
    if "-c fetch" in command.text or ("describe pod" in command.text and command.page.stem == "pods"):
        return "ryzanstein-workers-fetched-0"
    if "--previous" in command.text:
        return "ryzanstein-workers-default-0"
    component = "gateway" if "REQUEST_ID" in command.text or command.text[-14:] == "delete pod POD" else "worker"
    ready = [each for each in installation.pods(component) if each["status"]["phase"] == "Running"]
    return str(ready[-1]["metadata"]["name"])


def typed(command: Command, terminal: Terminal, values: dict[str, str]) -> str:
    """Its output. Some results, such as spans and measurements, take time."""
    text = command.filled(values)
    if command.text in INSTEAD:
        text = text.replace(*INSTEAD[command.text])
    if text.startswith("ryzanstein trace"):  # in another terminal
        text = f"kubectl port-forward service/ryzanstein-jaeger 16686 &\n{text}"
    wanted = SHOWS.get(str(command), SHOWS.get(command.name))
    if wanted is None:
        return terminal.type(text)
    deadline = time.monotonic() + 60
    while not re.search(wanted, shown := terminal.run(text).stdout):
        assert time.monotonic() < deadline, f"{command}: {shown}"
        time.sleep(1)
    return shown


@pytest.mark.parametrize("page", FOLLOWED, ids=lambda page: page.stem)
def test_commands_of_a_runbook_work(page: Path, planted: Installation, terminal: Terminal) -> None:
    (node, *_) = planted.kube.items("nodes")
    values = {
        "NAMESPACE": planted.kube.namespace,
        "RELEASE": planted.release,
        "POOL": POOLS.get(page.stem, "default"),
        "NODE": node["metadata"]["name"],
        "N": "3",
    }
    for command in commands(page, CommandPlace.CLUSTER):
        request = {"REQUEST_ID": ask(planted)} if "REQUEST_ID" in command.text else {}
        about = {"POD": pod(planted, command)} if "POD" in command.text else {}
        assert typed(command, terminal, {**values, **request, **about}).strip(), f"{command}: nothing"


def test_every_expression_of_the_pages_is_answered(operated: Installation) -> None:
    """It is PromQL; that its metrics exist is another test's."""
    sent = [expression for page in FOLLOWED for expression in expressions(page)]
    assert len(sent) > 10
    with operated.kube.forward("ryzanstein-prometheus", 9090) as url:
        for expression in sent:
            Prometheus(url).query(expression)
