"""`ryzanstein bench compare`: finds metrics that changed by more than their noise.

A metric has changed if its medians differ by more than the larger of the two spreads. If nothing changed and noise is
normal, five rounds on each side report one metric in five hundred by chance, three rounds one in thirty. The comparison
cannot detect a machine that became slower between the two runs; measure both on the same day.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from rich.console import Console
from rich.table import Table

from services.cli.benchmarks.results import Better, Metric, Results, read_results, readable
from services.cli.errors import CommandError
from services.cli.tables import print_whole


class Verdict(StrEnum):
    """How a metric changed."""

    WORSE = "worse"
    BETTER = "better"
    SAME = "same"
    GONE = "gone"
    NEW = "new"


_STYLES = {Verdict.WORSE: "red", Verdict.BETTER: "green", Verdict.GONE: "yellow", Verdict.NEW: "yellow"}


@dataclass(frozen=True, slots=True)
class MetricChange:
    """One metric in both files; None for a file without it."""

    name: str
    before: Metric | None
    after: Metric | None
    verdict: Verdict


def judge(before: Metric, after: Metric) -> Verdict:
    """Whether the medians differ by more than the larger spread, and in which direction."""
    shift = after.median - before.median
    if abs(shift) <= max(before.spread, after.spread):
        return Verdict.SAME
    return Verdict.BETTER if (shift > 0) == (after.better is Better.HIGHER) else Verdict.WORSE


def compare(before: Results, after: Results) -> list[MetricChange]:
    """Compare every metric of either file, in the order of the newer one; raises CommandError if units differ."""
    changes = []
    for name in [*after.metrics, *(name for name in before.metrics if name not in after.metrics)]:
        old, new = before.metrics.get(name), after.metrics.get(name)
        if old is None or new is None:
            changes.append(MetricChange(name, old, new, Verdict.NEW if old is None else Verdict.GONE))
            continue
        if (old.unit, old.better) != (new.unit, new.better):
            raise CommandError(f"{name}: {old.unit}, {old.better} is better, became {new.unit}, {new.better} is better")
        changes.append(MetricChange(name, old, new, judge(old, new)))
    return changes


def run(before_file: Path, after_file: Path, *, everything: bool) -> bool:
    """Print the changed metrics; return whether any became worse."""
    before, after = _read(before_file), _read(after_file)
    changes = compare(before, after)
    console = Console()
    for what, old, new in _differences(before, after):
        console.print(f"not measured on the same: {what} was {old}, is {new}", style="yellow", highlight=False)
    shown = [change for change in changes if everything or change.verdict is not Verdict.SAME]
    if shown:
        print_whole(console, _table(shown, before, after))
    counts = {verdict: sum(change.verdict is verdict for change in changes) for verdict in Verdict}
    console.print(", ".join(f"{n} {verdict}" for verdict, n in counts.items() if n), highlight=False)
    return counts[Verdict.WORSE] > 0


def _read(path: Path) -> Results:
    results = read_results(path)
    if results.rounds < 2:
        raise CommandError(f"{path} holds one round: without a spread no change can be distinguished from noise")
    return results


def _differences(before: Results, after: Results) -> list[tuple[str, str, str]]:
    """Facts of the machine and versions that differ. Commits are left out: they are meant to differ."""
    old, new = before.machine | before.versions, after.machine | after.versions
    return [
        (name, old.get(name, "-"), new.get(name, "-")) for name in sorted(old | new) if old.get(name) != new.get(name)
    ]


def _table(changes: list[MetricChange], before: Results, after: Results) -> Table:
    table = Table(title=f"{before.commit} ({before.taken}) to {after.commit} ({after.taken})", title_justify="left")
    table.add_column("metric", overflow="fold")
    for column in ("before", "after", "unit", "change", "noise"):
        table.add_column(column, justify="right")
    table.add_column("")
    for change in changes:
        old, new = change.before, change.after
        known = new or old
        assert known is not None
        moved = (f"{_share(new.median - old.median, old):+.1%}", f"{_noise(old, new):.1%}") if old and new else ("", "")
        medians = [readable(metric.median) if metric else "-" for metric in (old, new)]
        style = _STYLES.get(change.verdict, "")
        table.add_row(change.name, *medians, known.unit, *moved, change.verdict.value, style=style)
    return table


def _share(difference: float, of: Metric) -> float:
    """A difference as a share of a metric's median; 0 for a median of zero."""
    return difference / of.median if of.median else 0.0


def _noise(old: Metric, new: Metric) -> float:
    return abs(_share(max(old.spread, new.spread), old))
