"""Mutual TLS on a cluster: callers refused at every port, what the wire carries, a new CA, and the way to
plain text and back, under load.
"""

from __future__ import annotations

import asyncio
import base64
import json
import secrets
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path

import httpx
import pytest
from ryzanstein.v1 import worker_pb2
from tokenizers import Tokenizer

from services.common.tls.access import CALLERS, COMPONENTS
from services.common.tls.certificate import AUTHORITIES, CERTIFICATE, KEY
from services.common.tls.issuing import Authority, Issued
from tests.certificates import write
from tests.charts.network import COORDINATOR, ROUTER, WORKER
from tests.cluster.conftest import Namespaces, settings
from tests.cluster.in_pods import ASK, CALL, LISTEN
from tests.cluster.installation import Installation
from tests.cluster.kube import Object, client_pod
from tests.cluster.load import ClusterLoad, Traffic
from tests.models import BUNDLED_MODEL
from tests.trust import Trusting, assert_callers_are_kept_to_their_methods, assert_strangers_are_refused, at

pytestmark = pytest.mark.timeout(1800)
VALUES = {
    "workers.defaults.replicas": 2,
    "workers.defaults.resources.requests.cpu": "100m",
    "gateway.replicas": 2,
    "router.replicas": 2,
    "networkPolicy.enabled": "false",  # callers are refused by their certificates alone
    "monitoring.mode": "none",
    "tracing.mode": "none",
}
# By phase, what is set besides; nothing for the way there.
BACK = {"use": {"tls.phase": "use"}, "offer": {"tls.phase": "offer"}, "": {"tls.mode": "off"}}
THERE = ("offer", "use", "require")
SERVERS = {"router": ROUTER, "coordinator": COORDINATOR, "worker": WORKER}
FOLDER = "/etc/ryzanstein/tls"
ROLLOUT_S = 600
# A router's call would leave the worker drained.
HARMFUL = frozenset(
    {
        ("router", "ryzanstein.v1.Worker/Drain"),
        ("router", "ryzanstein.v1.Worker/Sleep"),
        ("worker", "ryzanstein.v1.Worker/Sleep"),
    }
)


@pytest.fixture(scope="module")
def secured(namespaces: Namespaces) -> Installation:
    installation = Installation(namespaces("tls"))
    installation.install(*settings(VALUES))
    return installation


@pytest.fixture
def load(secured: Installation, figures: dict[str, object], request: pytest.FixtureRequest) -> Callable[..., None]:
    """Runs steps while clients ask; none of them may notice, and no container is restarted.

    `requests`: the load goes on after the steps until so many have been answered.
    """

    def run(*steps: Callable[[], object], requests: int = 0, shorts: int = 2) -> None:
        traffic = Traffic.undisturbed(secured.url, streams=4, tokens=40, shorts=shorts, short_tokens=2)
        with ClusterLoad(traffic, pause_s=0.05) as clients:
            for step in steps:
                step()
            enough = f"{requests} requests are answered"
            secured.kube.until(enough, lambda: len(clients.served) >= requests, timeout_s=900, every_s=1)
        figures[f"{request.node.name}, {len(steps)} steps"] = clients.figures()
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


def test_every_port_rejects_unauthorized_callers(secured: Installation, tmp_path: Path) -> None:
    trusting = servers(secured, tmp_path)
    asyncio.run(assert_callers_are_kept_to_their_methods(trusting, HARMFUL))
    asyncio.run(assert_strangers_are_refused(trusting, tmp_path / "strangers"))


def caller(installation: Installation, name: str, mounted: str, argument: object) -> Object:
    """A pod with a gateway's labels and the secret `mounted` that calls all servers."""
    labels = {
        "app.kubernetes.io/name": "ryzanstein",
        "app.kubernetes.io/instance": installation.release,
        "app.kubernetes.io/component": "gateway",
    }
    pod = client_pod(name, "cli", ("python", "-c", CALL, json.dumps(argument)), labels)
    pod["spec"]["volumes"] = [{"name": "tls", "secret": {"secretName": mounted}}]
    pod["spec"]["containers"][0]["volumeMounts"] = [{"name": "tls", "mountPath": FOLDER}]
    return pod


def test_pods_with_our_labels_are_known_by_their_certificates(secured: Installation, tmp_path: Path) -> None:
    """Callers by methods: with each component's certificate whatever their label says, with none, with an ended one."""
    trusting, kube, prefix = servers(secured, tmp_path), secured.kube, f"{secured.release}-tls"
    ended = write(tmp_path / "ended", "gateway", trusting.authority, life=timedelta(seconds=-1), domain=trusting.domain)
    data = {file.name: base64.b64encode(file.read_bytes()).decode() for file in ended.iterdir()}
    kube.apply({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "ended"}, "data": data})
    options = {"domain": trusting.domain, "folder": FOLDER, "servers": trusting.addresses}
    methods = {who: [each for each in CALLERS if (who, each) not in HARMFUL] for who in ("none", "ended", *COMPONENTS)}
    pods = {
        who: caller(
            secured,
            f"caller-{who}",
            {"ended": "ended", "none": f"{prefix}-gateway"}.get(who, f"{prefix}-{who}"),
            {**options, "methods": [(at(each), each) for each in methods[who]], "shown": who != "none"},
        )
        for who in methods
    }
    kube.apply(*pods.values())
    try:
        for who, pod in pods.items():
            name = pod["metadata"]["name"]
            kube.wait(f"pod/{name}", condition="jsonpath={.status.phase}=Succeeded", timeout_s=240)
            for method, code in zip(methods[who], json.loads(kube.logs(name, "main")), strict=True):
                if who in COMPONENTS:
                    assert (code == "PERMISSION_DENIED") is (who not in CALLERS[method]), (who, method, code)
                else:
                    assert code == "UNAVAILABLE", (who, method, code)
    finally:
        names = [pod["metadata"]["name"] for pod in pods.values()]
        kube.kubectl("delete", "pod", *names, "--force", "--grace-period=0")


def renew(installation: Installation, name: str, *options: str) -> None:
    """Run the CronJob's Job, and return once every pod has the certificates that it wrote."""
    kube = installation.kube
    renewal = kube.get("cronjob", f"{installation.release}-secrets-renewal")["spec"]["jobTemplate"]["spec"]
    renewal["template"]["spec"]["containers"][0]["args"] += options
    kube.apply({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, "spec": renewal})
    kube.wait(f"job/{name}", condition="condition=Complete", timeout_s=300)
    for component in ("gateway", *SERVERS, "redis"):
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
        requests=5_000,
        shorts=24,
    )
    after = secret(secured, "gateway")
    assert after[AUTHORITIES].count(b"BEGIN CERTIFICATE") == 1
    assert after[AUTHORITIES] != before[AUTHORITIES]
    assert after[CERTIFICATE] != before[CERTIFICATE]


def change(installation: Installation, phase: str, step: dict[str, str] | None = None) -> None:
    """One upgrade to this phase, and every pod of its revision ready, and of no other."""
    installation.begin(*settings({**VALUES, **(step or {})}))
    installation.wait_ready(ROLLOUT_S)
    kube, mine = installation.kube, f"app.kubernetes.io/instance={installation.release}"
    kube.until(
        "the old pods have ended",
        lambda: not any("deletionTimestamp" in pod["metadata"] for pod in kube.items("pods", mine)),
        timeout_s=ROLLOUT_S,
        every_s=1,
    )
    phases = {
        variable["value"]
        for component in ("gateway", *SERVERS)
        for variable in installation.pod(component)["spec"]["containers"][0]["env"]
        if variable["name"] == "RYZANSTEIN_TLS_PHASE"
    }
    assert phases == ({phase} if phase else set())


def overheard(installation: Installation) -> set[str]:
    """Traces of a prompt on a node's wire: its words, which go to Redis, or its tokens, which go to workers.

    The prompt is sent within a gateway's pod, and the request that ends the listening comes in plain text.
    """
    kube, name, end = installation.kube, secrets.token_hex(8), secrets.token_hex(16)
    prompt = f"A heron called {name} waits for fish at the river. "
    tokens = Tokenizer.from_file(str(BUNDLED_MODEL / "tokenizer.json")).encode(prompt).ids[4:-4]
    wanted = {"words": name.encode(), "tokens": packed(tokens), "end": end.encode()}
    hexadecimal = json.dumps({what: some.hex() for what, some in wanted.items()})
    pod = client_pod("listener", "cli", ("python", "-c", LISTEN, hexadecimal), {})
    gateway = installation.pod("gateway")
    pod["spec"] |= {"hostNetwork": True, "nodeName": gateway["spec"]["nodeName"], "securityContext": {"runAsUser": 0}}
    pod["spec"]["containers"][0]["securityContext"] = {"capabilities": {"add": ["NET_RAW"]}}
    kube.apply(pod)
    try:
        kube.wait("pod/listener", condition="condition=Ready")
        kube.until("it listens", lambda: "listening" in kube.logs("listener", "main"))
        requests = [("/v1/completions", {"prompt": prompt, "max_tokens": 4}), ("/v1/responses", {"input": prompt})]
        kube.exec(gateway["metadata"]["name"], "python", "-c", ASK, json.dumps(requests))
        httpx.get(f"{installation.url}/{end}", timeout=60)
        kube.wait("pod/listener", condition="jsonpath={.status.phase}=Succeeded")
        heard: list[str] = json.loads(kube.logs("listener", "main").splitlines()[-1])
    finally:
        kube.kubectl("delete", "pod", "listener", "--force", "--grace-period=0")
    assert "end" in heard
    return set(heard) - {"end"}


def packed(tokens: list[int]) -> bytes:
    """As a message holds them."""
    message = worker_pb2.Submit(prompt_ids=tokens).SerializeToString()
    return message[2:]  # without the field's number and length


def test_to_plain_text_and_back(secured: Installation, load: Callable[..., None]) -> None:
    assert overheard(secured) == set()
    load(*(partial(change, secured, phase, step) for phase, step in BACK.items()))
    assert overheard(secured) == {"words", "tokens"}
    # The way there is the same upgrade, three times.
    load(*(partial(change, secured, phase) for phase in THERE))
    assert overheard(secured) == set()
