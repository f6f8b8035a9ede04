"""`helm install` with default values: Ready, small, and it answers."""

from __future__ import annotations

import re
from functools import partial

import httpx
import openai
import pytest

from tests.cluster.conftest import Namespaces
from tests.cluster.installation import Installation

pytestmark = pytest.mark.smoke
MOST_CPU, MOST_MEMORY = 1.0, 2.5 * 2**30
LEFT = "import pathlib as p; print(p.Path.home(), *(f for f in p.Path('/tmp').rglob('*') if f.is_file()), sep='\\n')"
UNITS = {"": 1, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}


@pytest.fixture(scope="module")
def defaults(namespaces: Namespaces, figures: dict[str, object]) -> Installation:
    """In a namespace that enforces the restricted standard: what runs there runs anywhere."""
    restricted = {"pod-security.kubernetes.io/enforce": "restricted"}
    installation = Installation(namespaces("defaults", labels=restricted), model="")
    figures["helm install to Ready, s"] = round(installation.install(), 1)
    return installation


def cpu(text: str) -> float:
    return float(text.removesuffix("m")) / (1000 if text.endswith("m") else 1)


def memory(text: str) -> float:
    number, unit = re.fullmatch(r"(\d+)(\D*)", text).groups()
    return float(number) * UNITS[unit]


def test_requests_fit_a_laptop(defaults: Installation) -> None:
    pods = defaults.kube.items("pods", "app.kubernetes.io/component!=secrets")
    pods = [pod for pod in pods if pod["status"]["phase"] == "Running"]
    requests = [c["resources"]["requests"] for pod in pods for c in pod["spec"]["containers"]]
    assert sum(cpu(request["cpu"]) for request in requests) <= MOST_CPU
    assert sum(memory(request["memory"]) for request in requests) <= MOST_MEMORY


def test_the_default_model_answers(defaults: Installation) -> None:
    client = openai.OpenAI(base_url=f"{defaults.url}/v1", api_key="unused", max_retries=0)
    ask = partial(client.chat.completions.create, model="smollm2-135m-instruct", max_tokens=24, temperature=0)
    question = [{"role": "user", "content": "Name the capital of France."}]
    plain = ask(messages=question)
    stream = ask(messages=question, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    assert text == plain.choices[0].message.content
    assert "Paris" in text
    assert httpx.get(f"{defaults.url}/health").json()["status"] == "ok"


def test_helm_test_passes(defaults: Installation) -> None:
    """Chat, stream, a session's second turn, and Prometheus reads every component."""
    defaults.kube.helm("test", defaults.release, "--timeout", "150s", timeout_s=160)


def test_no_service_leaves_a_file_in_its_home(defaults: Installation) -> None:
    """It may write to /tmp alone, and to that for a moment only: what has served would fill a node otherwise."""
    for component in ("gateway", "router", "coordinator", "worker"):
        name = defaults.pod(component)["metadata"]["name"]
        home, *left = defaults.kube.exec(name, "python", "-c", LEFT).splitlines()
        assert (home, left) == ("/tmp", []), component


def test_no_container_restarted(defaults: Installation) -> None:
    restarts = {name: count for name, count in defaults.kube.restarts().items() if "-secrets-" not in name}
    assert not any(restarts.values()), restarts


def test_repeated_helm_upgrade_restarts_no_pods(defaults: Installation) -> None:
    before = serving(defaults)
    defaults.install()
    assert serving(defaults) == before


def serving(installation: Installation) -> set[str]:
    """Its pods but those of Jobs: the one that renews certificates runs by the clock."""
    pods = installation.kube.items("pods", "app.kubernetes.io/component!=secrets")
    return {pod["metadata"]["name"] for pod in pods}
