"""The published comparison with other servers is what the kept results say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.compare_report import read_results, summary

ROOT = Path(__file__).parents[3]
MACHINES = sorted((ROOT / "bench" / "results").glob("*.json"))


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.stem)
def test_the_page_shows_the_kept_results(machine: Path) -> None:
    assert summary(read_results(machine)) in (ROOT / "docs" / "performance.md").read_text()


def results() -> dict:
    def run(rate: float) -> dict:
        return {"output_tokens_per_s": rate, "tpot_ms_p50": 2.0, "largest_gap_over_median": 3.0, "errors": 0}

    load = {"ryzanstein": [run(10), run(30), run(20)], "slow": [run(5)], "fast": [run(40), run(50), run(60)]}
    servers = dict.fromkeys(load, 1.0)
    return {"shape": "15m", "start_s": servers, "memory_mib": servers, "scenarios": {"one request": load}}


def test_a_machine_has_one_table_of_all_its_models_smallest_first(tmp_path: Path) -> None:
    larger = {**results(), "shape": "0.5b", "start_s": {"ryzanstein": 2.0}, "memory_mib": {"ryzanstein": 2.0}}
    larger["scenarios"] = {"one request": {"ryzanstein": results()["scenarios"]["one request"]["ryzanstein"]}}
    rounded = {**larger, "shape": "15m", "format": "int8"}
    kept = {"0.5b": larger, "15m int8": rounded, "15m": results()}
    (tmp_path / "machine.json").write_text(json.dumps(kept))
    assert summary(read_results(tmp_path / "machine.json")).splitlines() == [
        "| ryzanstein / fast / slow | 15m | 15m int8 | 0.5b |",
        "| --- | ---: | ---: | ---: |",
        "| one request | 20 / 50 / 5 (**0.40**) | 20 / – / – | 20 / – / – |",
        "| ours over ours in bf16 |  | 1.00 |  |",
        "| largest gap over the usual | 3.0 / 3.0 / 3.0 | 3.0 / – / – | 3.0 / – / – |",
        "| start, s | 1.0 / 1.0 / 1.0 | 2.0 / – / – | 2.0 / – / – |",
        "| memory, MiB | 1 / 1 / 1 | 2 / – / – | 2 / – / – |",
    ]
