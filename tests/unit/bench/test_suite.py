"""`make bench`, with a bench that takes seconds: real numbers in a file and a page."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bench.reading import lower
from bench.suite.rounds import BenchError, gather, run_round
from bench.suite.steps import Step
from services.cli.benchmarks.results import Better, read_results

PROJECT = Path(__file__).resolve().parents[3]


@pytest.mark.needs("git")
def test_each_round_gives_a_sample_and_the_run_records_its_commit_and_machine(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.suite", "--rounds", "2", "--only", "scheduler", "--out", str(tmp_path)]
    ran = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr
    data, page = (Path(line) for line in ran.stdout.split())
    assert page == data.with_suffix(".md")
    results = read_results(data)
    assert {name.partition("/")[0] for name in results.metrics} == {"scheduler"}
    assert all(len(metric.samples) == results.rounds == 2 for metric in results.metrics.values())
    assert results.metrics["scheduler/64 decodes/step p50"].median > 1
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=PROJECT, capture_output=True, text=True, check=True).stdout
    assert head.startswith(results.commit.removesuffix("+changes"))
    assert int(results.machine["cores"]) >= 1
    assert results.versions["python"] == ".".join(map(str, sys.version_info[:3]))


async def test_a_bench_that_fails_is_named_with_its_last_words(tmp_path: Path) -> None:
    broken = Step("engine", "bench.nothing", ())
    with pytest.raises(BenchError, match=r"engine ended with status 1:(.|\n)*No module named bench\.nothing"):
        await run_round((broken,), 0, tmp_path)


def test_a_metric_that_a_round_lacks_is_refused() -> None:
    both = [lower("a/b", 1, "ms"), lower("a/c", 1, "ms")]
    assert gather([both, both])["a/c"].better is Better.LOWER
    with pytest.raises(ValueError, match="not measured once in every round: a/c"):
        gather([both, both[:1]])
