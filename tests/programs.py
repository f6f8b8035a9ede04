"""The programs of Kubernetes that tests call: from ``RYZANSTEIN_TEST_BIN`` first, then from ``PATH``."""

from __future__ import annotations

import os
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest

CHART = Path(__file__).resolve().parents[1] / "charts" / "ryzanstein"


def search_path() -> str:
    """``PATH`` with the folder of ``RYZANSTEIN_TEST_BIN`` before it."""
    return os.pathsep.join(filter(None, [os.environ.get("RYZANSTEIN_TEST_BIN"), os.environ.get("PATH")]))


def required() -> bool:
    """Whether a missing program or cluster is a failure, as in the gate, instead of a skip."""
    return os.environ.get("RYZANSTEIN_REQUIRE_CLUSTER") == "1"


def missing(what: str) -> str:
    """Skip the calling test loudly, or fail it where nothing may be left out."""
    reason = f"{what} is not there: put it on PATH, or its folder into RYZANSTEIN_TEST_BIN"
    if required():
        pytest.fail(reason)
    pytest.skip(reason)


@cache
def program(name: str) -> str | None:
    """The path of a program, if it is there."""
    return shutil.which(name, path=search_path())


@cache
def helm(major: int) -> str | None:
    """Helm of this major version, whether it is called ``helm3``, ``helm4`` or ``helm``."""
    for path in filter(None, (program(f"helm{major}"), program("helm"))):
        version = subprocess.run([path, "version", "--short"], capture_output=True, text=True, check=True).stdout
        if version.startswith(f"v{major}."):
            return path
    return None
