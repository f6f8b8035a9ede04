"""The published comparison with other servers is what the kept results say."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.compare_report import read_results, summary

ROOT = Path(__file__).parents[3]
MACHINES = sorted((ROOT / "bench" / "results").glob("*.json"))


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.stem)
def test_the_page_shows_the_kept_results(machine: Path) -> None:
    assert summary(read_results(machine)) in (ROOT / "docs" / "performance.md").read_text()
