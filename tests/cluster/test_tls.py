"""Mutual TLS on a cluster: who is refused at every port, a new CA, and the way to plain text and back, under load."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from services.common.tls.access import COMPONENTS
from services.common.tls.certificate import AUTHORITIES, CERTIFICATE, KEY
from services.common.tls.issuing import Authority, Issued
from tests.charts.network import COORDINATOR, ROUTER, WORKER
from tests.cluster.conftest import Namespaces, settings
from tests.cluster.installation import Installation
from tests.cluster.load import Load, Traffic
from tests.trust import Trusting, assert_callers_are_kept_to_their_methods, assert_strangers_are_refused

pytestmark = pytest.mark.timeout(1800)
VALUES = {
    "workers.defaults.replicas": 2,
    "workers.defaults.resources.requests.cpu": "100m",
    "gateway.replicas": 2,
    "router.replicas": 2,
    "networkPolicy.enabled": "false",  # what refuses a caller here is its certificate alone
    "monitoring.mode": "none",
    "tracing.mode": "none",
}
REQUIRE = {"tls.mode": "generated"}
USE, OFFER = ({**REQUIRE, "tls.phase": phase} for phase in ("use", "offer"))
OFF = {"tls.mode": "off"}
SERVERS = {"router": ROUTER, "coordinator": COORDINATOR, "worker": WORKER}
FOLDER = "/etc/ryzanstein/tls"
ROLLOUT_S = 600
# A router's call would leave the worker drained.
HARMFUL = frozenset({("router", "ryzanstein.v1.Worker/Drain")})


@pytest.fixture(scope="module")
def secured(namespaces: Namespaces) -> Installation:
    installation = Installation(namespaces("tls"))
    installation.install(*settings({**VALUES, **REQUIRE}))
    return installation


@pytest.fixture
def load(secured: Installation, figures: dict[str, object], request: pytest.FixtureRequest) -> Callable[..., None]:
    """Runs steps while clients ask; none of them may notice, and no container is restarted."""

    def run(*steps: Callable[[], object]) -> None:
        with Load(Traffic.undisturbed(secured.url, streams=4, tokens=40, shorts=2), pause_s=0.05) as clients:
            for step in steps:
                step()
        figures[request.node.name] = clients.figures()
        clients.assert_unharmed()
        assert not any(count for name, count in secured.kube.restarts().items() if "-secrets-" not in name)

    return run


def secret(installation: Installation, name: str) -> dict[str, bytes]:
    data = installation.kube.get("secret", f"{installation.release}-tls-{name}")["data"]
    return {key: base64.b64decode(value) for key, value in data.items()}


def servers(installation: Installation, folder: Path) -> Trusting:
    """One pod of every component that serves others, with all components' certificates."""
    for component in COMPONENTS:
        (folder / component).mkdir()
        for name, content in secret(installation, component).items():
            (folder / component / name).write_bytes(content)
    made = secret(installation, "ca")
    addresses = {name: f"{installation.pod(name)['status']['podIP']}:{port}" for name, port in SERVERS.items()}
    domain = f"{installation.release}.{installation.kube.namespace}"
    return Trusting(folder, Authority(Issued(made[CERTIFICATE], made[KEY])), domain, addresses)


def test_every_port_refuses_whoever_is_not_its_caller(secured: Installation, tmp_path: Path) -> None:
    it = servers(secured, tmp_path)
    asyncio.run(assert_callers_are_kept_to_their_methods(it, HARMFUL))
    asyncio.run(assert_strangers_are_refused(it, tmp_path / "strangers"))


def renew(installation: Installation, name: str, *options: str) -> None:
    """Run the CronJob's Job, and return once every pod has the certificates that it wrote."""
    kube = installation.kube
    renewal = kube.get("cronjob", f"{installation.release}-secrets-renewal")["spec"]["jobTemplate"]["spec"]
    renewal["template"]["spec"]["containers"][0]["args"] += options
    kube.apply({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, "spec": renewal})
    kube.wait(f"job/{name}", condition="condition=Complete", timeout_s=300)
    for component in ("gateway", *SERVERS):
        wanted = secret(installation, component)
        for pod in installation.pods(component):
            mounted(installation, pod["metadata"]["name"], wanted, name)


def mounted(installation: Installation, pod: str, wanted: dict[str, bytes], cause: str) -> None:
    """Return once a pod has these files. A changed pod is looked at at once; the kubelet would take a minute or two."""
    installation.kube.kubectl("annotate", "pod", pod, f"ryzanstein.dev/test={cause}", "--overwrite")
    show = ("cat", *(f"{FOLDER}/{name}" for name in (CERTIFICATE, AUTHORITIES)))
    content = (wanted[CERTIFICATE] + wanted[AUTHORITIES]).decode()
    installation.kube.until(
        f"{pod} has its certificate", lambda: installation.kube.exec(pod, *show) == content, timeout_s=300, every_s=1
    )


def allow_the_next_step(installation: Installation) -> None:
    """The next run goes on at once. A run waits ten minutes otherwise, within which kubelets are done for sure."""
    stepped = base64.b64encode(b"0").decode()
    change = json.dumps({"data": {"stepped": stepped}})
    installation.kube.kubectl("patch", "secret", f"{installation.release}-tls-ca", "--patch", change)


def test_a_new_ca_and_new_certificates(secured: Installation, load: Callable[..., None]) -> None:
    before = secret(secured, "gateway")
    load(
        lambda: renew(secured, "renewal-trusts", "--new-authority"),
        lambda: allow_the_next_step(secured),
        lambda: renew(secured, "renewal-issues"),
        lambda: allow_the_next_step(secured),
        lambda: renew(secured, "renewal-forgets"),
    )
    after = secret(secured, "gateway")
    assert after[AUTHORITIES].count(b"BEGIN CERTIFICATE") == 1
    assert after[AUTHORITIES] != before[AUTHORITIES]
    assert after[CERTIFICATE] != before[CERTIFICATE]


def change(installation: Installation, step: dict[str, str]) -> None:
    """One upgrade, and every pod of its revision ready: the next step is for after that."""
    installation.begin(*settings({**VALUES, **step}))
    installation.wait_ready(ROLLOUT_S)


def test_to_plain_text_and_back(secured: Installation, load: Callable[..., None]) -> None:
    load(*(partial(change, secured, step) for step in (USE, OFFER, OFF)))
    load(*(partial(change, secured, step) for step in (OFFER, USE, REQUIRE)))
