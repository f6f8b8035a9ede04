"""`ryzanstein kube doctor` on planted faults: each is named, and the old pods serve meanwhile."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cluster.conftest import Namespaces, settings
from tests.cluster.installation import Installation

pytestmark = pytest.mark.timeout(400)
VALUES = {
    "workers.defaults.replicas": 2,
    "workers.defaults.resources.requests.cpu": "100m",
    "workers.defaults.startupBudgetSeconds": 60,
    "router.replicas": 2,
    "gateway.replicas": 2,
}
POOL = "workers.pools.second"
FAULTS: dict[str, tuple[dict[str, object], tuple[str, ...]]] = {
    "image": ({"image.tag": "9.9.9"}, ("gateway-9.9.9", "pull")),
    "model": ({f"{POOL}.model": "file:///no/model"}, ("/no/model",)),
    "memory": (
        {
            f"{POOL}.servedName": "two",
            f"{POOL}.resources.limits.memory": "200Mi",
            f"{POOL}.resources.requests.memory": "100Mi",
        },
        ("memory",),
    ),
    "claim": ({f"{POOL}.model": "pvc://nowhere/model"}, ("nowhere",)),
    "password": ({"redis.auth.existingSecret.name": "absent"}, ("absent",)),
}


@pytest.fixture(scope="module")
def well(namespaces: Namespaces) -> Installation:
    installation = Installation(namespaces("doctor"))
    installation.install(*settings(VALUES))
    return installation


def findings(installation: Installation, kubeconfig: Path) -> list[dict[str, Any]]:
    command = [
        str(Path(sys.executable).parent / "ryzanstein"),
        "kube",
        "doctor",
        "--json",
        "-n",
        installation.kube.namespace,
    ]
    environment = {**os.environ, "KUBECONFIG": str(kubeconfig)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode in (0, 1), done.stderr
    findings: list[dict[str, Any]] = json.loads(done.stdout)["findings"]
    assert bool(findings) == bool(done.returncode)
    return findings


def test_doctor_reports_no_findings_on_a_healthy_cluster(well: Installation, kubeconfig: Path) -> None:
    assert findings(well, kubeconfig) == []


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named(well: Installation, kubeconfig: Path, fault: str) -> None:
    wrong, words = FAULTS[fault]
    well.begin(*settings({**VALUES, **wrong}), "--reset-values")
    try:

        def named() -> bool:
            text = json.dumps(findings(well, kubeconfig)).lower()
            return all(word in text for word in words)

        try:
            well.kube.until(f"doctor names {words}", named, timeout_s=120, every_s=3)
        except AssertionError as error:
            raise AssertionError(f"{error}: {findings(well, kubeconfig)}") from error
        for finding in findings(well, kubeconfig):
            assert finding["do"], finding
        body = {"model": "ryzanstein-tiny", "prompt": "def ", "max_tokens": 4}
        assert httpx.post(f"{well.url}/v1/completions", json=body, timeout=60).is_success, "the old pods serve"
    finally:
        well.begin(*settings(VALUES), "--reset-values")
        well.wait_ready()
