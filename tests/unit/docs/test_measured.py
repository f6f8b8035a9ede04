"""The README's numbers that `make bench` gives are the medians of the results it links to."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from services.cli.benchmarks.results import Results, read_results

PROJECT = Path(__file__).resolve().parents[3]
README = (PROJECT / "README.md").read_text()
ROW = re.compile(r'^\| [^|]+ \| (?P<result>[^|]+) \| `make bench ARGS="--only (?P<bench>[\w-]+)"` \|$', re.MULTILINE)
NUMBER = re.compile(r"(?P<value>\d+(?:\.(?P<digits>\d+))?) (?P<unit>ms|µs|s)\b")
PER_SECOND = {"us": 1e6, "µs": 1e6, "ms": 1e3, "s": 1.0}

# The metrics that the numbers of a row are, in their order.
METRICS = {
    "start": ["start/from the command to the first token"],
    "gateway": ["gateway/REST, 1 client/answer p50"],
    "router": ["router/100 workers, 200/s, plain/decision p50"],
    "coordinator": ["coordinator/100 workers x 5000 blocks/event to visible p50"],
    "collectives": [f"collectives/2 ranks, 64 KiB/all-reduce {whose} p50" for whose in ("ours", "gloo")],
    "scheduler": ["scheduler/64 decodes/step p50"],
}


@pytest.fixture(scope="module")
def results() -> Results:
    linked = re.search(r"\]\((bench/results/[\w-]+)\.md\)", README)
    assert linked is not None
    return read_results(PROJECT / f"{linked[1]}.json")


def test_every_row_is_looked_at() -> None:
    assert {row["bench"] for row in ROW.finditer(README)} == set(METRICS)


@pytest.mark.parametrize("row", list(ROW.finditer(README)), ids=lambda row: row["bench"])
def test_a_number_is_the_median_rounded(row: re.Match[str], results: Results) -> None:
    numbers = list(NUMBER.finditer(row["result"]))
    for number, name in zip(numbers, METRICS[row["bench"]], strict=True):
        metric = results.metrics[name]
        measured = metric.median / PER_SECOND[metric.unit] * PER_SECOND[number["unit"]]
        assert float(number["value"]) == round(measured, len(number["digits"] or "")), name
