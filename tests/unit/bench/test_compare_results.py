"""`ryzanstein bench compare` calls worse what moved further than it varies, that always, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from services.cli.benchmarks.comparison import Verdict, compare, judge
from services.cli.benchmarks.results import Better, Metric, Results, read_results
from services.cli.errors import CommandError
from services.cli.main import app

# Whole numbers: sums and differences are exact, so that no property hangs on a rounding.
values = st.integers(1, 10_000)
directions = st.sampled_from(Better)


@st.composite
def metrics(draw: st.DrawFn, better: Better | None = None) -> Metric:
    samples = draw(st.lists(values, min_size=2, max_size=9))
    return Metric(unit="ms", better=better or draw(directions), samples=tuple(samples))


def shifted(metric: Metric, by: float) -> Metric:
    return metric.model_copy(update={"samples": tuple(sample + by for sample in metric.samples)})


def results(rounds: int = 2, machine: str = "here", **named: Metric) -> Results:
    return Results(
        taken="2026-01-01T00:00:00Z",
        commit="0" * 12,
        rounds=rounds,
        machine={"processor": machine},
        versions={},
        metrics=named,
    )


@given(st.dictionaries(st.text(min_size=1), metrics(), min_size=1))
def test_a_file_is_never_worse_than_its_own_copy(named: dict[str, Metric]) -> None:
    file = results().model_copy(update={"metrics": named})  # as keywords some names would be taken for others
    assert {change.verdict for change in compare(file, file)} == {Verdict.SAME}


@given(metrics(), st.integers(1, 10_000))
def test_a_shift_beyond_the_spread_is_always_told(metric: Metric, beyond: int) -> None:
    shift = (metric.spread + beyond) * (1 if metric.better is Better.LOWER else -1)  # to the worse
    assert judge(metric, shifted(metric, shift)) is Verdict.WORSE
    assert judge(metric, shifted(metric, -shift)) is Verdict.BETTER


@given(metrics(), st.data())
def test_a_shift_within_the_spread_is_never_told(metric: Metric, data: st.DataObject) -> None:
    limit = int(metric.spread)
    assert judge(metric, shifted(metric, data.draw(st.integers(-limit, limit)))) is Verdict.SAME


MS = Metric(unit="ms", better=Better.LOWER, samples=(10, 11, 12))


def test_a_metric_in_one_file_only_is_listed_without_failing(tmp_path: Path) -> None:
    shown = run(tmp_path, results(old=MS, both=MS), results(new=MS, both=MS))
    assert shown.exit_code == 0
    assert "1 same, 1 gone, 1 new" in shown.stdout


def run(folder: Path, before: Results, after: Results, *options: str) -> Result:
    paths = [folder / "before.json", folder / "after.json"]
    for path, file in zip(paths, (before, after), strict=True):
        path.write_text(file.model_dump_json())
    return CliRunner().invoke(app, ["bench", "compare", *map(str, paths), *options], env={"COLUMNS": "200"})


def test_worse_is_exit_status_1_and_named(tmp_path: Path) -> None:
    shown = run(tmp_path, results(wait=MS, rest=MS), results(wait=shifted(MS, 3), rest=MS))
    assert shown.exit_code == 1
    row = next(line for line in shown.stdout.splitlines() if "wait" in line)
    assert "+27.3%" in row
    assert "worse" in row
    assert "rest" not in shown.stdout, "what did not move is shown with --all only"


def test_better_is_exit_status_0(tmp_path: Path) -> None:
    shown = run(tmp_path, results(wait=MS, rest=MS), results(wait=shifted(MS, -3), rest=MS), "--all")
    assert shown.exit_code == 0
    assert "rest" in shown.stdout
    assert "1 better, 1 same" in shown.stdout


def test_a_result_of_another_machine_is_reported(tmp_path: Path) -> None:
    shown = run(tmp_path, results(wait=MS), results(machine="there", wait=MS))
    assert "not measured on the same: processor was here, is there" in shown.stdout


def test_a_changed_unit_is_refused() -> None:
    with pytest.raises(CommandError, match="wait: ms, lower is better, became s, lower is better"):
        compare(results(wait=MS), results(wait=MS.model_copy(update={"unit": "s"})))


def test_one_round_is_refused(tmp_path: Path) -> None:
    one = Metric(unit="ms", better=Better.LOWER, samples=(10,))
    shown = run(tmp_path, results(rounds=1, wait=one), results(rounds=1, wait=one))
    assert shown.exit_code == 1
    assert "without a spread no change can be distinguished from noise" in shown.stderr


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not a file of `make bench`: the file"),
        ('{"format": 2}', "format"),
        (
            '{"taken": "", "commit": "", "rounds": 1, "machine": {}, "versions": {}, "metrics": {"x": {}}}',
            "metrics.x.unit",
        ),
    ],
)
def test_a_wrong_file_is_refused_by_the_field(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "results.json"
    path.write_text(text)
    with pytest.raises(CommandError, match=message):
        read_results(path)
