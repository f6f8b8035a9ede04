"""Facts of the machine and the software that a run is measured on."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from importlib.metadata import version
from pathlib import Path

import psutil

PROJECT = Path(__file__).resolve().parents[2]
_PACKAGES = ("torch", "numpy", "grpcio", "protobuf", "uvloop", "fastapi", "uvicorn", "tokenizers", "redis")


def machine() -> dict[str, str]:
    """Processor, usable cores, memory and kernel."""
    model = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return {
        "processor": model[1] if model else platform.machine(),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
        "kernel": platform.release(),
    }


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that affect speed."""
    return {"python": platform.python_version(), **{name: version(name) for name in _PACKAGES}}


def commit() -> str:
    """The checked-out commit, with "+changes" if tracked files differ from it; "unknown" without git or a clone."""
    if not shutil.which("git") or not (PROJECT / ".git").exists():
        return "unknown"
    changed = _git("status", "--porcelain", "--untracked-files=no")
    return _git("rev-parse", "--short=12", "HEAD") + ("+changes" if changed else "")


def _git(*arguments: str) -> str:
    ran = subprocess.run(["git", *arguments], cwd=PROJECT, check=True, capture_output=True, text=True)
    return ran.stdout.strip()
