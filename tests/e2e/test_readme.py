"""The README's commands, run as they stand there, one after the other, against an installation of their own.

Only the port and the folder of the executables are other ones. A block that is not run has a comment above it that says
why: `<!-- not run: reason -->`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

from services.cli.stack.default_model import NAME, PACKAGE
from tests.shell import captured
from tests.stack import RunningStack, environment, running_stack

PROJECT = Path(__file__).resolve().parents[2]
FENCE = re.compile(
    r"(?:<!-- not run: (?P<why>[^>]+) -->\n+)?^```(?P<language>sh|python)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)
BIN = Path(sys.executable).parent


@dataclass(frozen=True)
class CodeBlock:
    """One fenced block of the README."""

    language: str
    text: str
    why_not_run: str

    def at(self, port: int) -> list[str]:
        """The command that runs it against the installation on `port`."""
        text = self.text.replace("127.0.0.1:8000", f"127.0.0.1:{port}").replace(".venv/bin/", f"{BIN}/")
        if self.language == "python":
            return [sys.executable, "-c", text]
        text = re.sub(r"(ryzanstein (?:status|down))", rf"\1 --port {port}", text)
        text = text.replace("ryzanstein chat", f"ryzanstein chat --url http://127.0.0.1:{port}")
        return ["bash", "-euo", "pipefail", "-c", text]


BLOCKS = [
    CodeBlock(block["language"], block["text"], block["why"] or "")
    for block in FENCE.finditer((PROJECT / "README.md").read_text())
]
RUN = [block for block in BLOCKS if not block.why_not_run]


def block_with(text: str) -> CodeBlock:
    """The block that is run and holds `text`."""
    (only,) = [block for block in RUN if text in block.text]
    return only


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    """The installation of `make run`, stopped by the README's own last command."""
    if not find_spec(PACKAGE):
        pytest.skip("the default model is not installed: make install")
    with running_stack(tmp_path_factory.mktemp("run"), model="") as running:
        yield running


def run(block: CodeBlock, stack: RunningStack) -> str:
    ran = captured(
        block.at(stack.port),
        cwd=PROJECT,
        env=environment(stack.runtime_dir) | {"no_proxy": "127.0.0.1"},
        stdin=subprocess.DEVNULL,
    )
    assert ran.returncode == 0, f"{block.text}\n{ran.stdout}\n{ran.stderr}"
    return ran.stdout


@pytest.mark.needs("curl")
def test_curl_gets_the_capital_of_france(stack: RunningStack) -> None:
    answer = json.loads(run(block_with("curl"), stack))
    assert "Paris" in answer["choices"][0]["message"]["content"]
    assert answer["usage"]["completion_tokens"] <= 64


def test_the_openai_client_streams_an_answer(stack: RunningStack) -> None:
    assert len(run(block_with("from openai import OpenAI"), stack).strip()) > 10


def test_status_chat_and_down(stack: RunningStack) -> None:
    output = run(block_with("ryzanstein status"), stack)
    assert "worker-0" in output
    assert NAME in output
    assert stack.process.wait(timeout=180) == 0, "down stops what up started"
    again = stack.ryzanstein("down", "--port", str(stack.port))
    assert again.returncode == 1
    assert f"nothing runs on port {stack.port}" in again.stderr


def test_no_other_block_is_left_unrun() -> None:
    assert len(RUN) == 3, f"a block of the README is neither run nor marked: {[block.text for block in RUN]}"


@pytest.mark.parametrize(
    ("target", "starts"),
    [
        ("run", f"PYTHONDONTWRITEBYTECODE= exec {Path('.venv/bin/ryzanstein')} up"),
        ("test", f"PYTHONDONTWRITEBYTECODE= {Path('.venv/bin/pytest')} -n 4"),
    ],
)
def test_make_target_runs_the_tested_command(target: str, starts: str) -> None:
    """The installing commands are not run; `ryzanstein up` was started by the other tests here."""
    assert f"make {target} " in BLOCKS[0].text
    plan = captured(
        [shutil.which("make") or "make", "--dry-run", "--no-print-directory", target],
        cwd=PROJECT,
        env=os.environ | {"ARGS": "", "PYTEST_ARGS": "", "MAKEFLAGS": ""},
        timeout=120,
        check=True,
    )
    assert plan.stdout.rstrip().splitlines()[-1].strip() == starts
