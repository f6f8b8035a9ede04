"""The last lines of a run say what was left out and how to have it; `--passed=FILE` adds up runs of several machines.

It leaves out the tests that the file names, and adds those that pass: one machine tests what it can, another the rest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator
from pathlib import Path

import pytest

from tests.programs import program

# Folders whose tests are collected by targets of their own alone.
OTHER_TARGETS = ("cluster", "triton", "vllm")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--passed", type=Path, metavar="FILE", help="leave out the tests it names, add those that pass")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "needs(*names): left out without these programs of tests/programs.py")


def pytest_runtest_setup(item: pytest.Item) -> None:
    for mark in item.iter_markers("needs"):
        for name in mark.args:
            program(name)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    passed = _named(config.getoption("--passed"))
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in passed])
    items[:] = [item for item in items if item.nodeid not in passed]


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> Generator[None, None, None]:
    yield
    stats = terminalreporter.stats
    if file := config.getoption("--passed"):
        bad = {report.nodeid for outcome in ("failed", "error") for report in stats.get(outcome, ())}
        passed = {report.nodeid for outcome in ("passed", "xfailed") for report in stats.get(outcome, ())}
        file.write_text("".join(f"{name}\n" for name in sorted(_named(file) | passed - bad)))
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in stats.get("skipped", ()))
    lines = [f"{count:6} {reason}" for reason, count in reasons.most_common()]
    if config.args_source is pytest.Config.ArgsSource.TESTPATHS:
        folders = {report.nodeid.split("/")[1] for report in stats.get("", ())}
        lines += [f"   all tests/{name}: make test-{name}" for name in OTHER_TARGETS if name not in folders]
    if lines:
        terminalreporter.section("left out, and how to have it")
        terminalreporter.write_line("\n".join(lines))


def _named(file: Path | None) -> set[str]:
    return set(file.read_text().splitlines()) if file and file.exists() else set()
