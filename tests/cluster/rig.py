"""Faults that only a cluster on this machine allows: power, cables, and signals to processes of containers."""

from __future__ import annotations

import os
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.kube import Object


@dataclass(frozen=True)
class Rig:
    """The script that has started the cluster; `RYZANSTEIN_TEST_RIG` names it."""

    script: Path

    def power_off(self, node: str) -> None:
        """Every process of the node is gone at once."""
        self._run("node-stop", node)

    def power_on(self, node: str) -> None:
        """It boots, with its disk."""
        self._run("node-start", node)

    def unplug(self, node: str) -> None:
        """No packet passes; its processes run on."""
        self._run("node-cut", node)

    def plug_in(self, node: str) -> None:
        """Packets pass again."""
        self._run("node-join", node)

    def pids(self, pod: Object, module: str) -> list[int]:
        """This machine's processes in a pod that run a Python module: those whose first `-m` names it."""
        uid = pod["metadata"]["uid"]
        return [pid for pid in _processes() if uid in _read(pid, "cgroup") and _module(pid) == module]

    def signal(self, pod: Object, module: str, signum: signal.Signals) -> None:
        """Send a signal to the first process of a pod that runs the module; it must be there."""
        os.kill(min(self.pids(pod, module)), signum)

    def _run(self, *args: str) -> None:
        subprocess.run([str(self.script), *args], check=True, capture_output=True, timeout=120)


def _processes() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _module(pid: int) -> str:
    words = _read(pid, "cmdline").split("\0")
    return words[words.index("-m") + 1] if "-m" in words else ""


def _read(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
