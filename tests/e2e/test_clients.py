"""Public clients against the bundled model, each as its users have it: its own pins, a process, a script.

RYZANSTEIN_TEST_CLIENTS names those to run: folders of tests/e2e/clients, comma-separated, `python` or `all`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.stack import RunningStack

CLIENTS = Path(__file__).parent / "clients"
PYTHON = sorted(folder.parent.name for folder in CLIENTS.glob("*/requirements.txt"))
NODE = sorted(folder.parent.name for folder in CLIENTS.glob("*/package.json"))
WORDS = os.environ.get("RYZANSTEIN_TEST_CLIENTS", "").split(",")
WANTED = {
    name
    for word in WORDS
    for name in {"": [], "python": PYTHON, "all": PYTHON + NODE}.get(word.strip(), [word.strip()])
}


# Their packages are among those of the tests, so that they run without a wish.
OFFICIAL = ("anthropic", "openai-python", "openai-responses")


def asked_for(names: list[str]) -> list[object]:
    """The clients, but for those that nobody has asked for."""
    skip = pytest.mark.skip(reason="public clients are installed on request: RYZANSTEIN_TEST_CLIENTS=all")
    return [pytest.param(name, marks=() if name in WANTED else skip) for name in names]


def run(*command: str | Path, cwd: Path | None = None) -> None:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the clients that are asked for: they agree on what they share."""
    folder = tmp_path_factory.mktemp("clients")
    asked = [word for name in PYTHON if name in WANTED for word in ("-r", str(CLIENTS / name / "requirements.txt"))]
    run(sys.executable, "-m", "uv", "venv", "-q", "--python", sys.executable, folder)
    pins = ("-c", str(CLIENTS / "constraints.txt"))
    run(sys.executable, "-m", "uv", "pip", "install", "-q", "--python", folder / "bin" / "python", *pins, *asked)
    return folder / "bin" / "python"


def test_names_are_known() -> None:
    assert set(PYTHON + NODE) >= WANTED


def test_the_table_of_clients_has_every_folder() -> None:
    table = tomllib.loads((CLIENTS.parents[2] / "docs" / "reference" / "clients.toml").read_text())["client"]
    assert {client["folder"] for client in table if "folder" in client} == set(PYTHON + NODE)


@pytest.mark.parametrize("name", OFFICIAL)
def test_an_official_client(stack: RunningStack, name: str) -> None:
    run(sys.executable, CLIENTS / name / "talk.py", stack.url)


@pytest.mark.parametrize("name", asked_for(PYTHON))
def test_a_python_client(stack: RunningStack, request: pytest.FixtureRequest, name: str) -> None:
    run(request.getfixturevalue("python"), CLIENTS / name / "talk.py", stack.url)


@pytest.mark.needs("npm")
@pytest.mark.parametrize("name", asked_for(NODE))
def test_a_node_client(stack: RunningStack, tmp_path: Path, name: str) -> None:
    folder = shutil.copytree(CLIENTS / name, tmp_path / name)
    run("npm", "install", "--silent", "--no-audit", "--no-fund", cwd=folder)
    run("node", "talk.mjs", stack.url, cwd=folder)
