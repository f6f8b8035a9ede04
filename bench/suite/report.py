"""A run for people: a Markdown page with a table and a picture for each area."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from pathlib import Path

import matplotlib as mpl

mpl.use("svg")
from matplotlib import pyplot as plt  # the backend is chosen before

from services.cli.benchmarks.results import Metric, Results, readable

_ROW_INCHES, _WIDTH_INCHES = 0.22, 9.0
_LOG_FROM = 30.0  # largest over smallest median from which a linear axis hides the small ones


def areas(metrics: Mapping[str, Metric]) -> dict[str, dict[str, Metric]]:
    """Metrics by the first part of their names, which is left out."""
    split = [(*name.split("/", 1), metric) for name, metric in metrics.items()]
    return {area: {name: metric for _, name, metric in rows} for area, rows in groupby(split, key=lambda row: row[0])}


def summarise(results: Results, pictures: Mapping[str, str]) -> str:
    """The page; `pictures` are the relative addresses by area."""
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
        lines += ["", f"## {area.capitalize()}", "", f"![{area}]({pictures[area]})", ""]
        lines += ["| metric | median | spread | unit | better |", "|---|---:|---:|---|---|"]
        for name, metric in metrics.items():
            numbers = f"{readable(metric.median)} | {readable(metric.spread)}"
            lines.append(f"| {name} | {numbers} | {metric.unit} | {metric.better} |")
    return "\n".join(lines) + "\n"


def draw(area: str, metrics: Mapping[str, Metric], path: Path) -> None:
    """Medians as bars, or marks where the axis is logarithmic, samples as dots; a panel per unit, in SVG."""
    by_unit: dict[str, list[tuple[str, Metric]]] = {}
    for name, metric in metrics.items():
        by_unit.setdefault(f"{metric.unit}, {metric.better} is better", []).append((name, metric))
    heights = [len(rows) + 2 for rows in by_unit.values()]
    size = (_WIDTH_INCHES, _ROW_INCHES * sum(heights) + 0.6)
    with mpl.rc_context({"svg.hashsalt": area, "svg.fonttype": "none", "font.size": 8}):
        figure, panels = plt.subplots(len(by_unit), 1, figsize=size, height_ratios=heights, squeeze=False)
        for panel, (title, rows) in zip(panels[:, 0], by_unit.items(), strict=True):
            medians = [metric.median for _, metric in rows]
            if min(medians) > 0 and max(medians) / min(medians) > _LOG_FROM:
                panel.set_xscale("log")  # which has no zero for bars to begin at
                panel.plot(medians, range(len(rows)), "|", color="#9ecae1", markersize=12, markeredgewidth=4)
                panel.grid(axis="x", color="#eeeeee")
            else:
                panel.barh(range(len(rows)), medians, color="#9ecae1")
            for row, (_, metric) in enumerate(rows):
                panel.plot(metric.samples, [row] * len(metric.samples), ".", color="#08519c", markersize=4)
            panel.set_yticks(range(len(rows)), [name for name, _ in rows])
            panel.invert_yaxis()
            panel.set_xlabel(title)
        figure.tight_layout()
        figure.savefig(path, metadata={"Date": None})
        plt.close(figure)


def write_report(results: Results, folder: Path, name: str) -> list[Path]:
    """Write NAME.json, NAME.md and NAME/AREA.svg; returns the JSON and the Markdown file."""
    pictures = folder / name
    pictures.mkdir(parents=True, exist_ok=True)
    by_area = areas(results.metrics)
    for area, metrics in by_area.items():
        draw(area, metrics, pictures / f"{area}.svg")
    data, page = folder / f"{name}.json", folder / f"{name}.md"
    data.write_text(results.model_dump_json(indent=1) + "\n")
    page.write_text(summarise(results, {area: f"{name}/{area}.svg" for area in by_area}))
    return [data, page]
