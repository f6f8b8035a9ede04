"""Public clients, each as its users have it: its own pins, a process.

RYZANSTEIN_TEST_CLIENTS names those to run: folders of tests/e2e/clients, comma-separated, `python` or `all`. A folder's
`talk` talks to the bundled model. Its `agent`, a script or the command of a program, needs a model that calls tools and
has one that obeys (`obedient.py`); it is installed apart from the others, and not among `python`.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

from tests.e2e.obedient import obedient_stack
from tests.integration.gateway.fleet import MODEL
from tests.stack import RunningStack

CLIENTS = Path(__file__).parent / "clients"
PYTHON = sorted(folder.parent.name for folder in CLIENTS.glob("*/talk.py"))
NODE = sorted(folder.parent.name for folder in CLIENTS.glob("*/talk.mjs"))
AGENTS = sorted(folder.parent.name for folder in CLIENTS.glob("*/agent.*"))
WORDS = os.environ.get("RYZANSTEIN_TEST_CLIENTS", "").split(",")
WANTED = {
    name
    for word in WORDS
    for name in {"": [], "python": PYTHON, "all": PYTHON + NODE + AGENTS}.get(word.strip(), [word.strip()])
}
SECRET = "the words of a.txt"
RESOLVED = "2026-11-29"  # agents bring whatever their packages needed on this day


# Their packages are among those of the tests, so that they run without a wish.
OFFICIAL = ("anthropic", "openai-python", "openai-responses")


def asked_for(names: list[str]) -> list[object]:
    """The requested clients."""
    skip = pytest.mark.skip(reason="public clients are installed on request: RYZANSTEIN_TEST_CLIENTS=all")
    return [pytest.param(name, marks=() if name in WANTED else skip) for name in names]


def run(*command: str | Path, cwd: Path | None = None, env: dict[str, str] | None = None, limit_s: float = 280) -> str:
    """The output of a command."""
    done = subprocess.run(
        command,
        cwd=cwd,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def environment(folder: Path, *packages: str | Path) -> Path:
    """The interpreter of a new environment with packages, arguments of pip."""
    run(sys.executable, "-m", "uv", "venv", "-q", "--python", sys.executable, folder)
    python = folder / "bin" / "python"
    run(sys.executable, "-m", "uv", "pip", "install", "-q", "--python", python, *packages, limit_s=1200)
    return python


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the clients that are asked for: they agree on what they share."""
    sent = [word for name in PYTHON if name in WANTED for word in ("-r", str(CLIENTS / name / "requirements.txt"))]
    return environment(tmp_path_factory.mktemp("clients"), "-c", CLIENTS / "constraints.txt", *sent)


def test_names_are_known() -> None:
    assert set(PYTHON + NODE + AGENTS) >= WANTED


def test_the_table_of_clients_has_every_folder() -> None:
    table = tomllib.loads((CLIENTS.parents[2] / "docs" / "reference" / "clients.toml").read_text())["client"]
    assert {client["folder"] for client in table if "folder" in client} == set(PYTHON + NODE + AGENTS)


@pytest.mark.parametrize("name", OFFICIAL)
def test_an_official_client(stack: RunningStack, name: str) -> None:
    run(sys.executable, CLIENTS / name / "talk.py", stack.url)


@pytest.mark.parametrize("name", asked_for(PYTHON))
def test_a_python_client(stack: RunningStack, request: pytest.FixtureRequest, name: str) -> None:
    run(request.getfixturevalue("python"), CLIENTS / name / "talk.py", stack.url)


@pytest.mark.needs("npm")
@pytest.mark.parametrize("name", asked_for(NODE))
def test_a_node_client(stack: RunningStack, tmp_path: Path, name: str) -> None:
    run("node", "talk.mjs", stack.url, cwd=installed(name, tmp_path)[0])


def installed(name: str, folder: Path) -> tuple[Path, Path]:
    """A copy of a client's folder with its packages, and where their programs are."""
    copy = shutil.copytree(CLIENTS / name, folder / name)
    if (copy / "package.json").exists():
        run("npm", "install", "--silent", "--no-audit", "--no-fund", cwd=copy, limit_s=1200)
        return copy, copy / "node_modules" / ".bin"
    pins = ("--exclude-newer", RESOLVED, "-r", copy / "requirements.txt")
    return copy, environment(folder / "env", *pins).parent


def run_program(given: str, programs: Path, home: Path) -> None:
    """Run a program as its agent.toml says, in a folder of its own; what it finds in a.txt has to come back."""
    folder = home / "work"
    folder.mkdir(parents=True)
    (folder / "a.txt").write_text(SECRET)
    program = tomllib.loads(given.replace("{home}", str(home)).replace("{folder}", str(folder)))
    for name, text in program.get("files", {}).items():
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(text)
    own = {"HOME": str(home), "PWD": str(folder), "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", "CI": "1"}
    command, *arguments = program["command"]
    written = run(programs / command, *arguments, cwd=folder, env=os.environ | own | program["environment"])
    result = (folder / program["changes"]).read_text() if "changes" in program else written
    assert SECRET in result, written


@pytest.fixture
def emptied(tmp_path: Path) -> Iterator[Path]:
    """A folder that is emptied after the test: an agent and its packages take up to 7 GB."""
    yield tmp_path
    shutil.rmtree(tmp_path, ignore_errors=True)


@pytest.mark.timeout(1800)
@pytest.mark.needs("npm")
@pytest.mark.parametrize("name", asked_for(AGENTS))
async def test_an_agent(emptied: Path, name: str) -> None:
    """A tool is called, and its result is in the answer."""
    folder, programs = await asyncio.to_thread(installed, name, emptied)
    async with obedient_stack() as stack:
        if (folder / "agent.toml").exists():
            given = (folder / "agent.toml").read_text().replace("{url}", stack.url).replace("{model}", MODEL)
            given = given.replace("{words}", quote(SECRET))
            await asyncio.to_thread(run_program, given, programs, emptied / "home")
        else:
            script = next(folder.glob("agent.*"))
            interpreter = "node" if script.suffix == ".mjs" else programs / "python"
            await asyncio.to_thread(run, interpreter, script, stack.url, MODEL, cwd=folder)
