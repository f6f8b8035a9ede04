"""Redis with the users of the chart: each component may do its own work alone."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import yaml

from tests.programs import CHART

COMPONENTS = ("gateway", "router", "coordinator", "worker", "finetuner")
_OLDEST = 7  # rights to read a key without writing it


def rules(component: str, namespace: str) -> list[str]:
    """A component's rules, as `ACL SETUSER` takes them."""
    text = (CHART / "files" / "redis-users.yaml").read_text().replace("NAMESPACE", namespace)
    return str(yaml.safe_load(text)[component]).split()


def modern_server() -> str:
    """A `redis-server` that has such rights; empty if none is on PATH."""
    for folder in os.environ["PATH"].split(os.pathsep):
        program = Path(folder) / "redis-server"
        if program.is_file():
            said = subprocess.run([program, "--version"], capture_output=True, text=True, check=False).stdout
            if (found := re.search(r"v=(\d+)", said)) and int(found[1]) >= _OLDEST:
                return str(program)
    return ""
