"""What bench.compare measured, as Markdown and a picture.

python -m bench.compare_report bench/results/amx/peers-*.json --picture docs/pictures/peers-amx.svg
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import matplotlib as mpl
import typer

from bench.stats import median

mpl.use("svg")
from matplotlib import pyplot as plt  # the backend is chosen before

OURS = "ryzanstein"
_HEIGHT_INCHES, _PANEL_INCHES = 3.4, 4.2
_COLOURS = {OURS: "#08519c"}
_OTHER_COLOURS = ("#9ecae1", "#c7c7c7", "#fdd0a2")


def rates(results: dict, scenario: str) -> dict[str, float]:
    """Output tokens/s by server, medians over the rounds."""
    by_peer = results["scenarios"][scenario]
    return {peer: median([run["output_tokens_per_s"] for run in runs]) for peer, runs in by_peer.items()}


def ratio(found: dict[str, float]) -> float | None:
    """Ours over the best of the others; None when one of the two is missing: a server may not have started."""
    others = [rate for peer, rate in found.items() if peer != OURS]
    return found[OURS] / max(others) if others and OURS in found else None


def markdown(results: dict) -> str:
    """One table: a row per load, a column per server, the ratio last."""
    peers = list(results["start_s"])
    lines = [
        f"| {results['shape']} | {' | '.join(peers)} | ratio to the best other |",
        "|---|" + "---:|" * (len(peers) + 1),
    ]
    for scenario, by_peer in results["scenarios"].items():
        found = rates(results, scenario)
        cells = [_cell(by_peer[peer], found[peer]) for peer in peers]
        over = ratio(found)
        lines.append(f"| {scenario} | {' | '.join(cells)} | {'' if over is None else f'{over:.2f}'} |")
    for name, title, unit in (("start_s", "start", "s"), ("memory_mib", "memory", "MiB")):
        cells = [
            f"{results[name][peer]:,.1f} {unit}" if unit == "s" else f"{results[name][peer]:,.0f} {unit}"
            for peer in peers
        ]
        lines.append(f"| {title} | {' | '.join(cells)} | |")
    return "\n".join(lines)


def _cell(runs: list[dict], rate: float) -> str:
    tpot, gap = median([run["tpot_ms_p50"] for run in runs]), median([run["largest_gap_over_median"] for run in runs])
    failed = sum(run["errors"] for run in runs)
    return f"{rate:,.0f} ({tpot:.1f} ms; {gap:.1f}x)" + (f", {failed} failed" if failed else "")


def summary(files: list[dict]) -> str:
    """One table of a machine: a column per model, a row per load with every server's tokens/s and our ratio."""
    files = sorted(files, key=lambda results: _parameters(results["shape"]))
    peers = [OURS, *sorted({peer for results in files for peer in results["start_s"]} - {OURS})]
    scenarios = list(dict.fromkeys(scenario for results in files for scenario in results["scenarios"]))
    rows = [[scenario, *(_rates_cell(results, scenario, peers) for results in files)] for scenario in scenarios]
    rows += [
        ["largest gap over the usual", *(_each(_largest_gaps(results), peers, ".1f") for results in files)],
        ["start, s", *(_each(results["start_s"], peers, ".1f") for results in files)],
        ["memory, MiB", *(_each(results["memory_mib"], peers, ",.0f") for results in files)],
    ]
    title = [" / ".join(peers), *(results["shape"] for results in files)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (title, ["---", *["---:"] * len(files)], *rows))


def _parameters(shape: str) -> float:
    return float(shape[:-1]) * {"m": 1e6, "b": 1e9}[shape[-1]]


def _rates_cell(results: dict, scenario: str, peers: list[str]) -> str:
    found = rates(results, scenario)
    over = ratio(found)
    failed = sum(run["errors"] for runs in results["scenarios"][scenario].values() for run in runs)
    cell = _each(found, peers, ",.0f") + ("" if over is None else f" (**{over:.2f}**)")
    return cell + (f", {failed} failed" if failed else "")


def _largest_gaps(results: dict) -> dict[str, float]:
    """By server, of all loads: the largest gap between two tokens over the median one, medians over the rounds."""
    found: dict[str, float] = {}
    for by_peer in results["scenarios"].values():
        for peer, runs in by_peer.items():
            found[peer] = max(found.get(peer, 0.0), median([run["largest_gap_over_median"] for run in runs]))
    return found


def _each(values: dict[str, float], peers: list[str], form: str) -> str:
    return " / ".join(format(values[peer], form) if peer in values else "–" for peer in peers)


def draw(files: list[dict], path: Path) -> None:
    """Bars of tokens/s per load, a panel per model, each load relative to the best of the others."""
    with mpl.rc_context({"svg.hashsalt": "peers", "svg.fonttype": "none", "font.size": 8}):
        size = (_PANEL_INCHES * len(files), _HEIGHT_INCHES)
        figure, panels = plt.subplots(1, len(files), figsize=size, squeeze=False, sharey=True)
        for panel, results in zip(panels[0], files, strict=True):
            _draw_panel(panel, results)
        panels[0, 0].set_ylabel("output tokens/s over the best other's")
        panels[0, 0].legend(loc="upper right")
        figure.tight_layout()
        figure.savefig(path, metadata={"Date": None})
        plt.close(figure)


def _draw_panel(panel: plt.Axes, results: dict) -> None:
    scenarios, peers = list(results["scenarios"]), list(results["start_s"])
    width = 0.8 / len(peers)
    others = iter(_OTHER_COLOURS)
    for index, peer in enumerate(peers):
        heights = []
        for scenario in scenarios:
            found = rates(results, scenario)
            heights.append(found[peer] / max(rate for other, rate in found.items() if other != OURS))
        places = [place + (index - (len(peers) - 1) / 2) * width for place in range(len(scenarios))]
        panel.bar(places, heights, width, label=peer, color=_COLOURS.get(peer) or next(others))
    panel.axhline(1, color="#444444", linewidth=0.6)
    panel.set_xticks(
        range(len(scenarios)), [scenario.replace(", ", ",\n").replace(" (", "\n(") for scenario in scenarios]
    )
    panel.set_title(f"{results['shape']} parameters")


def main(
    files: Annotated[list[Path], typer.Argument(help="What bench.compare wrote with --out.")],
    picture: Annotated[Path | None, typer.Option(help="Write an SVG there.")] = None,
) -> None:
    """Print a table of all FILES, then one of each."""
    results = [json.loads(file.read_text()) for file in files]
    print("\n\n".join([summary(results), *(markdown(each) for each in results)]))
    if picture is not None:
        picture.parent.mkdir(parents=True, exist_ok=True)
        draw(results, picture)


if __name__ == "__main__":
    typer.run(main)
