"""A missing program leaves its tests out, and the run says so; a second run with it takes these alone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.programs import PROGRAMS, ROOT

TESTS = """
import pytest

def test_alone():
    pass

@pytest.mark.needs("curl")
def test_with_curl():
    pass
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "test_few.py").write_text(TESTS)
    (tmp_path / "bin").mkdir()
    return tmp_path


def run(folder: Path, **variables: str) -> list[str]:
    """The last lines."""
    options = ("-c", os.devnull, "-p", "tests.left_out", "-p", "no:cacheprovider", f"--passed={folder / 'passed'}")
    environment = {**os.environ, "RYZANSTEIN_TEST_BIN": "", "RYZANSTEIN_REQUIRE": "", "PATH": str(folder / "bin")}
    command = [sys.executable, "-m", "pytest", *options, str(folder / "test_few.py")]
    done = subprocess.run(command, cwd=ROOT, env=environment | variables, capture_output=True, text=True, check=False)
    return done.stdout.splitlines()[-3:]


def test_a_missing_program_is_named_and_a_second_run_takes_the_tests_that_have_not_passed(folder: Path) -> None:
    *_, why, result = run(folder)
    assert why.split(maxsplit=1) == ["1", "curl is not there: apt install curl"]
    assert "1 passed, 1 skipped" in result
    (folder / "bin" / "curl").touch(0o755)
    assert "1 passed, 1 deselected" in run(folder)[-1]
    assert "2 deselected" in run(folder)[-1]


def test_a_missing_program_is_an_error_when_required(folder: Path) -> None:
    assert "1 passed, 1 error" in run(folder, RYZANSTEIN_REQUIRE="1")[-1]


def test_the_readme_names_packages_in_one_place() -> None:
    """The gate installs these on its newcomer's machine, and no others."""
    assert re.findall(r"apt install ([^`]*)`", (ROOT / "README.md").read_text()) == ["make python3-venv curl"]


def test_debians_packages_stand_in_contributing() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    listed = re.findall(r"`apt install ([\w -]+)`", text)[0].split()
    named = [re.match(r"apt install ([\w -]+)", program.source) for program in PROGRAMS.values()]
    assert sorted({package for actual in named if actual for package in actual[1].split()}) == listed
