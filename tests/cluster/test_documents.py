"""The guides' commands, run as they stand there, one block after the other."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.programs import CHART, helm, missing, program, search_path

pytestmark = pytest.mark.timeout(900)
ROOT = CHART.parents[1]
FENCE = re.compile(
    r"(?:<!-- file: (?P<file>\S+) -->\n)?^ *```(?P<language>sh|yaml)\n(?P<text>.*?)^ *```$", re.MULTILINE | re.DOTALL
)
# No node of the test's cluster has Grafana's image.
HELM = """#!/bin/sh
case $1 in install|upgrade) set -- "$@" --set monitoring.grafana.enabled=false;; esac
exec {helm} "$@"
"""
INSTALL = "kubectl create namespace llm; helm install ryzanstein charts/ryzanstein -n llm --wait --timeout 200s"
UPGRADED = """workers:
  defaults: {replicas: 2, resources: {requests: {cpu: 100m}}}
"""


@pytest.fixture
def folder(kubeconfig: Path, tmp_path: Path) -> Iterator[Path]:
    """Where a reader stands: the chart is there, and the programs are on PATH."""
    (tmp_path / "charts").symlink_to(CHART.parent)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "helm").write_text(HELM.format(helm=helm(3) or missing("Helm 3")))
    (tmp_path / "bin" / "helm").chmod(0o755)
    yield tmp_path
    kubectl = program("kubectl") or missing("kubectl")
    subprocess.run(
        [kubectl, "--kubeconfig", kubeconfig, "delete", "namespace", "llm", "--ignore-not-found"], check=True
    )


def follow(guide: Path, folder: Path, kubeconfig: Path) -> int:
    """Run the guide's commands and write its files; returns how many blocks were run."""
    blocks = list(FENCE.finditer(guide.read_text()))
    for block in blocks:
        if block["file"]:
            (folder / block["file"]).write_text(block["text"])
        elif block["language"] == "sh":
            run(block["text"], folder, kubeconfig)
    return len(blocks)


def run(text: str, folder: Path, kubeconfig: Path) -> None:
    path = f"{folder / 'bin'}{os.pathsep}{search_path()}"
    environment = {**os.environ, "PATH": path, "KUBECONFIG": str(kubeconfig)}
    shell = shutil.which("bash") or missing("bash")
    command = [shell, "-euo", "pipefail", "-c", text]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
    assert not done.returncode, f"{text}\n{done.stdout}\n{done.stderr}"


def test_the_deployment_guide(folder: Path, kubeconfig: Path) -> None:
    assert follow(ROOT / "docs/deployment.md", folder, kubeconfig) >= 5


def test_the_security_page(folder: Path, kubeconfig: Path) -> None:
    run(INSTALL, folder, kubeconfig)
    assert follow(ROOT / "docs/security.md", folder, kubeconfig) >= 3


def test_how_to_upgrade(folder: Path, kubeconfig: Path, earlier_chart: Path) -> None:
    (folder / "llm.yaml").write_text(UPGRADED)
    earlier = f"{earlier_chart} -f llm.yaml --set image.tag=previous"
    run(INSTALL.replace("charts/ryzanstein", earlier), folder, kubeconfig)
    assert follow(CHART / "UPGRADING.md", folder, kubeconfig) >= 4
