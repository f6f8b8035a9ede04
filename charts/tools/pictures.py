"""Pictures of the dashboards, drawn from what a Prometheus has: the panels' own queries over a stretch of time.

``python -m charts.tools.pictures http://127.0.0.1:9090 --minutes 20`` writes ``docs/pictures/rz-*.png``. Places,
titles, units, stacking and legends are those of ``charts/ryzanstein/files/dashboards``, as Grafana reads them;
variables are at All. Exits with 1, and names them, when panels have nothing to show.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib import dates
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter
from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
DASHBOARDS = ROOT / "charts" / "ryzanstein" / "files" / "dashboards"
OTHERS = {"rz-k8s"}  # dashboards of clusters with kube-state-metrics and dcgm-exporter
VARIABLES = ("namespace", "release", "model", "pool", "component")
POINTS = 240
MOST_NAMES = 5  # in a legend
COLUMN, ROW = 0.55, 0.38  # inches of Grafana's grid

Json = dict[str, Any]


@dataclass(frozen=True)
class Line:
    """One series of a panel."""

    name: str
    times: list[datetime]
    values: list[float]


@dataclass(frozen=True)
class Source:
    """A Prometheus and the stretch of time that is looked at."""

    url: str
    start: float
    end: float

    @property
    def step(self) -> int:
        """Seconds between points, as Grafana would choose: not below a scrape."""
        return max(15, int((self.end - self.start) / POINTS))

    def lines(self, panel: Json) -> list[Line]:
        """All series of a panel's queries that have a number."""
        return [line for target in panel["targets"] for line in self._of(target)]

    def _of(self, target: Json) -> Iterator[Line]:
        # Grafana's $__rate_interval: four scrapes, or a step and a scrape.
        expr = target["expr"].replace("$__rate_interval", f"{max(60, self.step + 15)}s")
        for name in VARIABLES:
            expr = expr.replace(f'"${name}"', '".*"')
        parameters = {"query": expr, "start": str(self.start), "end": str(self.end), "step": str(self.step)}
        with urllib.request.urlopen(f"{self.url}/api/v1/query_range?{urllib.parse.urlencode(parameters)}") as answer:
            results = json.load(answer)["data"]["result"]
        for series in results:
            points = [(datetime.fromtimestamp(at, UTC), float(value)) for at, value in series["values"]]
            if any(not math.isnan(value) for _, value in points):
                legend = _legend(target["legendFormat"], series["metric"])
                yield Line(legend, [at for at, _ in points], [value for _, value in points])


def _legend(pattern: str, labels: dict[str, str]) -> str:
    return re.sub(r"{{\s*(\w+)\s*}}", lambda match: labels.get(match[1], ""), pattern).strip()


def amount(value: float, unit: str) -> str:
    """A number as Grafana writes it in a unit."""
    if unit == "percentunit":
        return f"{value * 100:.3g} %"
    if unit in ("bytes", "Bps"):
        power = min(4, int(math.log(value, 1024))) if value >= 1 else 0
        return f"{value / 1024**power:.3g} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}{'/s' if unit == 'Bps' else ''}"
    if unit == "s":
        for bound, factor, name in ((1e-3, 1e6, "µs"), (1, 1e3, "ms")):
            if 0 < value < bound:
                return f"{value * factor:.3g} {name}"
        return f"{value:.3g} s"
    short = f"{value / 1000:.3g} K" if value >= 10_000 else f"{value:.4g}"
    return short + {"reqps": " req/s", "ops": " ops/s"}.get(unit, "")


def draw(panel: Json, lines: list[Line], axes: Axes, source: Source) -> None:
    """One panel in its place."""
    axes.set_title(panel["title"], fontsize=9, loc="left", fontweight="bold")
    if panel["type"] == "stat":
        _stat(panel, lines, axes)
        return
    (_timeline if panel["type"] == "state-timeline" else _graph)(panel, lines, axes)
    axes.set_xlim(*(datetime.fromtimestamp(at, UTC) for at in (source.start, source.end)))
    axes.xaxis.set_major_locator(dates.AutoDateLocator(minticks=3, maxticks=6))
    axes.xaxis.set_major_formatter(dates.DateFormatter("%H:%M"))
    axes.tick_params(labelsize=7, length=2)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _stat(panel: Json, lines: list[Line], axes: Axes) -> None:
    axes.axis("off")
    unit = panel["fieldConfig"]["defaults"]["unit"]
    size = 18 if len(lines) == 1 and len(lines[0].name) < 20 else 9
    for place, line in enumerate(lines[:8]):
        newest = next(value for value in reversed(line.values) if not math.isnan(value))
        text = f"{amount(newest, unit)}  {line.name}".strip()
        axes.text(0.02, 0.85 - place / max(3, len(lines)), text, fontsize=size, va="top", transform=axes.transAxes)


def _timeline(panel: Json, lines: list[Line], axes: Axes) -> None:
    colours = {"0": "#e08a80", "1": "#a5d6b0"}
    for place, line in enumerate(lines):
        for at, following, value in zip(line.times, line.times[1:], line.values, strict=False):
            if not math.isnan(value):
                axes.barh(place, following - at, left=at, height=0.8, color=colours.get(f"{value:g}", "#999999"))
        axes.annotate(line.name, (0.01, place), xycoords=("axes fraction", "data"), fontsize=7, va="center")
    axes.set_yticks([])
    axes.invert_yaxis()


def _graph(panel: Json, lines: list[Line], axes: Axes) -> None:
    defaults = panel["fieldConfig"]["defaults"]
    lines = sorted(lines, key=lambda line: -max((v for v in line.values if not math.isnan(v)), default=0.0))
    named = [line.name if place < MOST_NAMES else "_" for place, line in enumerate(lines)]
    if "stacking" in defaults["custom"]:
        times = sorted({at for line in lines for at in line.times})
        heights = []
        for line in lines:
            known = dict(zip(line.times, line.values, strict=True))
            heights.append([0.0 if math.isnan(known.get(at, math.nan)) else known[at] for at in times])
        axes.stackplot(times, heights, labels=named, alpha=0.7)
    else:
        for line, name in zip(lines, named, strict=True):
            axes.plot(line.times, line.values, label=name, linewidth=1)
    axes.set_ylim(bottom=0)
    axes.set_ylim(top=1.5 * axes.get_ylim()[1])  # room for the legend
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: amount(value, defaults["unit"])))
    axes.grid(axis="y", linewidth=0.4, alpha=0.5)
    if any(named):
        axes.legend(
            fontsize=6, frameon=False, loc="upper left", ncols=2 if len(lines) > 3 and max(map(len, named)) < 24 else 1
        )


def picture(dashboard: Json, source: Source) -> tuple[Figure, list[str]]:
    """A dashboard drawn, and the titles of its panels without anything to show."""
    height = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in dashboard["panels"]) + 2
    figure = Figure(figsize=(24 * COLUMN, height * ROW), dpi=90)
    figure.text(0.01, 1 - 1 / height, dashboard["title"], fontsize=13, fontweight="bold", va="center")
    empty = []
    for panel in dashboard["panels"]:
        at = panel["gridPos"]
        top = 1 - (at["y"] + 2) / height
        if panel["type"] == "row":
            figure.text(0.01, top - 0.5 / height, panel["title"], fontsize=10, color="#555555", va="center")
            continue
        # Room for the title above, and for numbers to the left and below.
        box = ((at["x"] + 1.1) / 24, top - (at["h"] - 1.0) / height, (at["w"] - 1.4) / 24, (at["h"] - 2.0) / height)
        axes = figure.add_axes(box)
        if lines := source.lines(panel):
            draw(panel, lines, axes, source)
        else:
            axes.set_title(f"{panel['title']}: no data", fontsize=9, loc="left")
            axes.axis("off")
            empty.append(f"{dashboard['uid']}: {panel['title']}")
    return figure, empty


def pictures(source: Source, folder: Path) -> list[str]:
    """Write a picture of each dashboard; returns the panels that had nothing to show."""
    mpl.rcParams["font.family"] = "DejaVu Sans"
    empty: list[str] = []
    for file in sorted(DASHBOARDS.glob("*.json")):
        if file.stem not in OTHERS:
            figure, without = picture(json.loads(file.read_text()), source)
            figure.savefig(folder / f"{file.stem}.png")
            with Image.open(folder / f"{file.stem}.png") as drawn:
                few = drawn.convert("RGB").quantize(64)  # lines and letters need no more, and a third of the bytes
            few.save(folder / f"{file.stem}.png", optimize=True)
            empty += without
    return empty


def main() -> None:
    """See the module's description."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="where Prometheus listens, e.g. a port-forward's end")
    parser.add_argument("--minutes", type=float, default=20, help="how much of the time until now")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "pictures")
    args = parser.parse_args()
    now = time.time()
    if empty := pictures(Source(args.url, now - args.minutes * 60, now), args.out):
        sys.exit("nothing to show: " + ", ".join(empty))


if __name__ == "__main__":
    main()
