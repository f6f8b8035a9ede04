"""A model that takes minutes to load: nobody is restarted for it, and clients hear when to come back."""

from __future__ import annotations

import time

import httpx
import pytest
import yaml

from tests.cluster.conftest import Namespaces
from tests.cluster.installation import Installation

pytestmark = pytest.mark.timeout(400)
LOADING_S = 100
# Python imports it in every process; it makes ranks start late.
SLOW = f"""
import sys, time
if "services.worker.rank" in sys.orig_argv:
    time.sleep({LOADING_S})
"""
VALUES = {
    "extraObjects": {
        "slow": {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": "slow"},
            "data": {"sitecustomize.py": SLOW},
        }
    },
    "workers": {
        "defaults": {
            "startupBudgetSeconds": 240,
            "env": {"PYTHONPATH": "/slow"},
            "extraVolumes": {"slow": {"configMap": {"name": "slow"}}},
            "extraVolumeMounts": {"/slow": {"name": "slow"}},
        }
    },
    "router": {"settings": {"queueTimeoutS": 2}},
}


def test_a_slow_start(namespaces: Namespaces, tmp_path_factory: pytest.TempPathFactory) -> None:
    installation = Installation(namespaces("slow-start"))
    values = tmp_path_factory.mktemp("values") / "slow.yaml"
    values.write_text(yaml.safe_dump(VALUES))
    began = time.monotonic()
    installation.begin("-f", str(values))
    installation.kube.until("the gateway serves", lambda: bool(answers(installation)))
    early = ask(installation)
    assert time.monotonic() - began < LOADING_S, "asked before the model was there"
    assert early.status_code == httpx.codes.SERVICE_UNAVAILABLE, early.text
    assert int(early.headers["retry-after"]) > 0
    installation.wait_ready(300)
    assert time.monotonic() - began > LOADING_S
    assert ask(installation).is_success
    assert not any(count for name, count in installation.kube.restarts().items() if "-secrets-" not in name)


def answers(installation: Installation) -> bool:
    try:
        return httpx.get(f"{installation.url}/livez", timeout=2).is_success
    except httpx.HTTPError:
        return False


def ask(installation: Installation) -> httpx.Response:
    body = {"model": "ryzanstein-tiny", "prompt": "def ", "max_tokens": 4}
    return httpx.post(f"{installation.url}/v1/completions", json=body, timeout=60)
