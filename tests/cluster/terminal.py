"""Where a reader of the documents types: the chart is there, programs are on PATH, kubectl knows the namespace."""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import yaml

from tests.programs import CHART, program, search_path
from tests.shell import captured

# No node of the test's cluster has Grafana's image.
HELM = """#!/bin/sh
case $1 in install|upgrade) set -- "$@" --set monitoring.grafana.enabled=false;; esac
exec {helm} "$@"
"""
# Whoever types the next line has seen that this one forwards; at the end they end it.
FORWARD = re.compile(
    r"^(?P<line> *kubectl .*port-forward \S+ (?P<port>\d+)(?::\d+)?)(?P<rest>(?: &)?(?:\s+#.*)?)$", re.MULTILINE
)
FORWARDED = r"""\g<line> &
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT
timeout 30 sh -c 'until curl -so /dev/null 127.0.0.1:\g<port>; do sleep 0.2; done'"""


@dataclass(frozen=True)
class Terminal:
    """One reader's."""

    folder: Path
    kubeconfig: Path

    @classmethod
    def open(cls, folder: Path, kubeconfig: Path, namespace: str) -> Terminal:
        """In a folder of its own; commands that name no namespace are about this one."""
        config = yaml.safe_load(kubeconfig.read_text())
        for context in config["contexts"]:
            context["context"]["namespace"] = namespace
        (folder / "kubeconfig").write_text(yaml.safe_dump(config))
        (folder / "charts").symlink_to(CHART.parent)
        (folder / "bin").mkdir()
        (folder / "bin" / "helm").write_text(HELM.format(helm=program("helm 3")))
        (folder / "bin" / "helm").chmod(0o755)
        return cls(folder, folder / "kubeconfig")

    def run(self, text: str) -> subprocess.CompletedProcess[str]:
        """Its output from a shell that stops at the first failure."""
        path = f"{self.folder / 'bin'}{os.pathsep}{search_path()}"
        environment = {**os.environ, "PATH": path, "KUBECONFIG": str(self.kubeconfig)}
        command = ["bash", "-euo", "pipefail", "-c", FORWARD.sub(FORWARDED, text)]
        return captured(command, cwd=self.folder, env=environment, timeout=600)

    def type(self, text: str) -> str:
        """Its output; it must succeed, and contain the expected text."""
        done = self.run(text)
        shown = f"{text}\n{done.stdout}\n{done.stderr}"
        assert not done.returncode, shown
        assert "No resources found" not in done.stderr, shown
        return done.stdout
