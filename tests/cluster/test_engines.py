"""A release with a pool of each engine: vLLM's says what is true, and its streams outlive its processes and pods."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.cluster import in_pods
from tests.cluster.conftest import Namespaces
from tests.cluster.installation import Installation
from tests.cluster.kube import REPOSITORY, Kube
from tests.cluster.load import ClusterLoad, Traffic
from tests.cluster.terminal import Terminal
from tests.programs import CHART

START_S = 900  # start of two vLLM pods at once on a busy machine
OURS, VLLMS = "ryzanstein-tiny", "tiny-vllm"
MODELS = {OURS: "exact", VLLMS: "approximate"}  # and how they resume a text
TOKENS = 150
STATUS_TRIES = 10
VERSION = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
IMAGE = f"{REPOSITORY}:worker-vllm-cpu-{VERSION}"
VALUES = {
    "image": {"references": {"worker-vllm": IMAGE}},
    "workers": {
        "defaults": {"replicas": 2, "resources": {"requests": {"cpu": "50m"}}},
        "pools": {
            "default": None,
            "native": {},
            "vllm": {
                "engine": "vllm",
                "engineArgs": {"enforce_eager": True, "block_size": 32},
                "servedName": VLLMS,
                "dtype": "float32",
                "maxModelLen": 512,
                "kvTokens": 8192,
                "startupBudgetSeconds": START_S,
                "settings": {"recoveryLimitS": 2 * START_S},
                "resources": {"requests": {"cpu": "400m", "memory": "1Gi"}, "limits": {"memory": "4Gi"}},
                "env": {"OMP_NUM_THREADS": "1"},
            },
        },
    },
}
# Kills vLLM's process that schedules, and what replaces it, until the file is there: it would be back within seconds.
KEEP_KILLING = """
import pathlib, time, psutil
while not pathlib.Path("/tmp/enough").exists():
    for process in psutil.process_iter():
        try:
            if " ".join(process.cmdline()).startswith("VLLM::EngineCore"):
                process.kill()
        except psutil.Error:
            pass  # it has ended meanwhile
    time.sleep(0.1)
"""

pytestmark = pytest.mark.timeout(2 * START_S)


@pytest.fixture(scope="module")
def values(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("values") / "engines.yaml"
    file.write_text(yaml.safe_dump(VALUES))
    return file


@pytest.fixture(scope="module")
def ours_alone(namespaces: Namespaces, values: Path) -> Installation:
    """The pool on vLLM has no pods yet."""
    installation = Installation(namespaces("engines"))
    nodes = installation.kube.items("nodes")
    there = {name for node in nodes for image in node["status"]["images"] for name in image["names"]}
    if IMAGE not in there:
        pytest.skip(f"no node has {IMAGE}, which is built on request: docs/images.md, vLLM")
    installation.install("-f", str(values), "--set=workers.pools.vllm.replicas=0")
    return installation


@pytest.fixture(scope="module")
def terminal(ours_alone: Installation, tmp_path_factory: pytest.TempPathFactory) -> Terminal:
    return Terminal.open(tmp_path_factory.mktemp("terminal"), ours_alone.kube.kubeconfig, ours_alone.kube.namespace)


@pytest.fixture(scope="module")
def engines(ours_alone: Installation, values: Path) -> Installation:
    ours_alone.begin("-f", str(values))
    ours_alone.wait_ready(START_S)
    return ours_alone


def vllm_pods(installation: Installation) -> list[str]:
    pods = installation.kube.items("pods", "ryzanstein.dev/pool=vllm")
    return [pod["metadata"]["name"] for pod in pods]


def phase(kube: Kube, pod: str) -> str:
    return str(kube.get("pod", pod)["status"]["phase"])


def ready(kube: Kube, pod: str) -> bool:
    conditions = kube.get("pod", pod)["status"]["conditions"]
    return any((each["type"], each["status"]) == ("Ready", "True") for each in conditions)


def workers(terminal: Terminal) -> dict[str, Any]:
    """The state of each worker by `ryzanstein kube status`. It gives the router of a busy node up after two seconds."""
    for _ in range(STATUS_TRIES):
        shown = terminal.run("ryzanstein kube status --json")
        if not shown.returncode:
            return {each["worker_id"]: each for each in json.loads(shown.stdout)["router"]["workers"]}
    raise AssertionError(shown.stderr)


def recovers(view: dict[str, Any]) -> bool:
    return (view["state"]["phase"], view["eligible"]) == ("PHASE_RECOVERING", False)


def ask(installation: Installation, model: str) -> httpx.Response:
    body = {"model": model, "prompt": "def ", "max_tokens": 4, "temperature": 0}
    return httpx.post(f"{installation.url}/v1/completions", json=body, timeout=60)


def in_gateway(installation: Installation, program: str, *args: str) -> str:
    """A program's output in the pod of the gateway."""
    return installation.kube.exec(installation.pod("gateway")["metadata"]["name"], "python", "-c", program, *args)


def resumed(installation: Installation) -> float:
    """Number of streams that have gone on with another worker of vLLM's."""
    samples = (line.rpartition(" ") for line in in_gateway(installation, in_pods.METRICS).splitlines())
    name = f'ryzanstein_gateway_resumed_streams_total{{model="{VLLMS}",resume="approximate"}}'
    return sum(float(value) for series, _, value in samples if series == name)


@contextmanager
def load_on_both(engines: Installation, figures: dict[str, object], what: str) -> Iterator[None]:
    """Clients of both models ask until the block ends. `what` happens to vLLM's pool, and no client sees it."""
    before = resumed(engines)
    exact, approximate = (
        Traffic.undisturbed(engines.url, streams=streams, tokens=TOKENS, shorts=1, model=model)
        for model, streams in ((OURS, 2), (VLLMS, 6))
    )
    with ClusterLoad(exact) as ours, ClusterLoad(approximate) as vllms:
        yield
    ours.assert_unharmed()
    assert_whole(vllms)
    seen = vllms.figures()
    figures[what] = {"resumed": resumed(engines) - before, "other texts": seen.pop("failed"), **seen}


def assert_whole(load: ClusterLoad) -> None:
    """No request failed, and every stream has all its tokens; the client of the load compares their usage."""
    tokens = [case.tokens for case in load.traffic.cases]
    wrong = [
        f"case {served.case}: {served.error or served.answer}"
        for served in load.served
        if served.error or (served.answer.finish, len(served.answer.ids)) != ("length", tokens[served.case])
    ]
    assert not wrong, f"{len(wrong)} of {len(load.served)} requests:\n" + "\n".join(wrong[:10])
    assert load.served


def test_vllm_pods_are_unready_until_vllm_serves(ours_alone: Installation, terminal: Terminal, values: Path) -> None:
    """Pods, the model's route and the status say that vLLM is starting; our own engine's pool serves meanwhile."""
    kube = ours_alone.kube
    refused = ask(ours_alone, VLLMS)
    assert refused.status_code == httpx.codes.SERVICE_UNAVAILABLE, refused.text
    assert int(refused.headers["retry-after"]) > 0
    ours_alone.begin("-f", str(values))
    kube.until("vLLM's containers run", lambda: [phase(kube, pod) for pod in vllm_pods(ours_alone)] == ["Running"] * 2)
    assert not any(ready(kube, pod) for pod in vllm_pods(ours_alone))
    views = workers(terminal)
    assert not any(views[pod]["eligible"] for pod in vllm_pods(ours_alone) if pod in views), views
    assert ask(ours_alone, OURS).is_success
    ours_alone.wait_ready(START_S)
    assert all(workers(terminal)[pod]["eligible"] for pod in vllm_pods(ours_alone))
    assert ask(ours_alone, VLLMS).is_success


def test_cards_and_models_say_how_each_resumes(engines: Installation) -> None:
    listed = httpx.get(f"{engines.url}/v1/models").raise_for_status().json()["data"]
    assert {each["id"]: each["resume"] for each in listed} == MODELS
    addresses = [f"{pod['status']['podIP']}:50054" for pod in engines.pods("worker")]
    cards = [json.loads(in_gateway(engines, in_pods.CARD, address)) for address in addresses]
    ours = {"model": OURS, "engine": "native", "resume": "exact", "pulls": True}
    vllms = {"model": VLLMS, "engine": "vllm", "resume": "approximate", "pulls": False}
    assert sorted(cards, key=lambda card: card["engine"]) == [ours, ours, vllms, vllms]


def test_a_killed_engine_costs_no_stream_a_token(
    engines: Installation, terminal: Terminal, figures: dict[str, object]
) -> None:
    """Its pod is not ready until the engine is back, and neither the pod nor its container is replaced for it."""
    kube, (victim, other) = engines.kube, sorted(vllm_pods(engines))
    restarts, before = kube.restarts(), resumed(engines)
    with load_on_both(engines, figures, "vLLM's engine killed"):
        kube.exec(victim, "sh", "-c", 'python -c "$1" >/dev/null 2>&1 &', "sh", KEEP_KILLING)
        kube.until("the status says that it recovers", lambda: recovers(workers(terminal)[victim]))
        kube.until("the victim is not ready", lambda: not ready(kube, victim))
        assert workers(terminal)[other]["eligible"]
        kube.exec(victim, "touch", "/tmp/enough")
        kube.until("the victim is ready again", lambda: ready(kube, victim), timeout_s=START_S, every_s=2)
        kube.until("the router sends it work", lambda: workers(terminal)[victim]["state"]["running"] > 0)
    assert resumed(engines) > before, "no stream was interrupted"
    assert kube.restarts() == restarts


def test_a_rollout_of_vllms_pool_loses_no_stream(engines: Installation, figures: dict[str, object]) -> None:
    """Streams that a pod does not end within its drain go on with the other one."""
    with load_on_both(engines, figures, "rollout of vLLM's pool"):
        engines.kube.kubectl("rollout", "restart", "statefulset/ryzanstein-workers-vllm")
        engines.wait_ready(2 * START_S)
    assert not any(count for name, count in engines.kube.restarts().items() if "-vllm-" in name)
