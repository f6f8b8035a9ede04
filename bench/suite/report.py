"""Writes a run as a Markdown page with a table for each area."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from pathlib import Path

from services.cli.benchmarks.results import Metric, Results, readable


def areas(metrics: Mapping[str, Metric]) -> dict[str, dict[str, Metric]]:
    """Group metrics by the first part of their names, and remove that part."""
    split = [(*name.split("/", 1), metric) for name, metric in metrics.items()]
    return {area: {name: metric for _, name, metric in rows} for area, rows in groupby(split, key=lambda row: row[0])}


def summarise(results: Results) -> str:
    """Format the page."""
    facts = " · ".join(f"{name} {value}" for name, value in (results.machine | results.versions).items())
    lines = [
        f"# Benchmarks of {results.taken}",
        "",
        f"`make bench` at commit {results.commit}, {results.rounds} interleaved rounds: {facts}.",
        "",
        "Medians over the rounds; the spread is the largest minus the smallest. Compare two files with",
        "`ryzanstein bench compare BEFORE.json AFTER.json`.",
    ]
    for area, metrics in areas(results.metrics).items():
        lines += ["", f"## {area.capitalize()}", ""]
        lines += ["| metric | median | spread | unit | better |", "|---|---:|---:|---|---|"]
        for name, metric in metrics.items():
            numbers = f"{readable(metric.median)} | {readable(metric.spread)}"
            lines.append(f"| {name} | {numbers} | {metric.unit} | {metric.better} |")
    return "\n".join(lines) + "\n"


def write_report(results: Results, folder: Path, name: str) -> list[Path]:
    """Write NAME.json and NAME.md; return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    data, page = folder / f"{name}.json", folder / f"{name}.md"
    data.write_text(results.model_dump_json(indent=1) + "\n")
    page.write_text(summarise(results))
    return [data, page]
