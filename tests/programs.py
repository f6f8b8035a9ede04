"""The programs that tests call and no wheel brings: each is there, or what needs it is skipped and says how to have it.

A test needs one by the mark `needs("curl")` or by its path, `program("curl")`. They are looked for in the folder
`RYZANSTEIN_TEST_BIN` first, then on `PATH`. Where `RYZANSTEIN_REQUIRE=1`, a missing one is a failure.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import httpx
import pytest

ROOT = Path(__file__).resolve().parents[1]
CHART = ROOT / "charts" / "ryzanstein"


@dataclass(frozen=True)
class Program:
    """How to have it; the names of its file, by default its own; and, if its version matters, what shows that."""

    source: str
    files: tuple[str, ...] = ()
    arguments: str = ""
    answers: str = ""  # a regular expression


DEBIAN = {
    "aarch64-linux-gnu-gcc": "gcc-aarch64-linux-gnu libc6-dev-arm64-cross",
    "cc": "gcc",
    "chromedriver": "chromium-driver",
    "chromium": "chromium",
    "curl": "curl",
    "free": "procps",
    "ip": "iproute2",
    "npm": "npm",
    "objdump": "binutils",
    "openssl": "openssl",
    "ps": "procps",
    "qemu-aarch64": "qemu-user",
    "ss": "iproute2",
    "vmstat": "procps",
}
_HELM, _PROMETHEUS = "https://helm.sh/docs/intro/install", "https://prometheus.io/download"
PROGRAMS = {
    **{name: Program(f"apt install {packages}") for name, packages in DEBIAN.items()},
    **{
        f"helm {major}": Program(
            f"{_HELM}, as helm{major} or helm", (f"helm{major}", "helm"), "version --short", rf"^v{major}\."
        )
        for major in (3, 4)
    },
    "bun": Program("npm install --global bun"),
    "git": Program("apt install git, in a clone of the repository", (), f"-C {ROOT} rev-parse HEAD", r"^\w{40}$"),
    "jaeger": Program("https://www.jaegertracing.io/download"),
    "kubectl": Program("https://kubernetes.io/docs/tasks/tools"),
    "prometheus": Program(_PROMETHEUS),
    "promtool": Program(_PROMETHEUS),
    # With TLS, which the wheels' have not.
    "redis 7": Program("apt install redis-server", ("redis-server",), "--version", r"v=(?:[7-9]|\d\d)\."),
}


def search_path() -> str:
    """``PATH`` with the folder of ``RYZANSTEIN_TEST_BIN`` before it."""
    return os.pathsep.join(filter(None, [os.environ.get("RYZANSTEIN_TEST_BIN"), os.environ.get("PATH")]))


def required() -> bool:
    """Whether a missing program, image or cluster is a failure, as in the gate, instead of a skip."""
    return os.environ.get("RYZANSTEIN_REQUIRE") == "1"


def left_out(reason: str) -> str:
    """Skip the calling test, or fail it where nothing may be left out."""
    if required():
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


def program(name: str) -> str:
    """The path of a program; without it the calling test is left out."""
    return find(name) or left_out(f"{name} is not there: {PROGRAMS[name].source}")


@cache
def find(name: str) -> str | None:
    """The path of a program, if it is there."""
    wanted = PROGRAMS[name]
    for file in wanted.files or (name,):
        for folder in search_path().split(os.pathsep):
            path = shutil.which(file, path=folder)
            if path and (not wanted.arguments or re.search(wanted.answers, _answer(path, wanted.arguments))):
                return path
    return None


def answers(url: str) -> bool:
    """Whether a started program serves this yet."""
    try:
        return httpx.get(url, timeout=2).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False


def _answer(path: str, arguments: str) -> str:
    return subprocess.run([path, *arguments.split()], capture_output=True, text=True, check=False).stdout
