from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.programs import program

# The client is a distribution of its own and not installed here.
CLIENT = Path(__file__).resolve().parents[3] / "clients" / "python"
if str(CLIENT) not in sys.path:
    sys.path.insert(0, str(CLIENT))
runpy.run_path(str(CLIENT / "build_sync.py"))["build_sync"]()  # tests are of the source as it is now


@pytest.fixture(scope="session")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The committed package, as a system without symbolic links gets it."""
    root = CLIENT.parents[1]
    folder = tmp_path_factory.mktemp("clone") / "ryzanstein"
    options = ["-c", "core.symlinks=false", "-c", "safe.directory=*"]
    subprocess.run([program("git"), *options, "clone", "-q", str(root), str(folder)], check=True, timeout=300)
    return folder
