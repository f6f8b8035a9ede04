"""Formats the results of bench.compare as Markdown.

python -m bench.compare_report bench/results/peers-amx.json
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from bench.stats import median

OURS = "ryzanstein"
_BF16 = "bf16"


def rates(results: dict, scenario: str) -> dict[str, float]:
    """Output tokens/s by server, medians over the rounds."""
    by_peer = results["scenarios"][scenario]
    return {peer: median([run["output_tokens_per_s"] for run in runs]) for peer, runs in by_peer.items()}


def ratio(measured: dict[str, float]) -> float | None:
    """Our rate over the best other one; None if either is missing, since a server may not have started."""
    others = [rate for peer, rate in measured.items() if peer != OURS]
    return measured[OURS] / max(others) if others and OURS in measured else None


def heading(results: dict) -> str:
    """The model's shape, and the format of its weights where it is not bfloat16."""
    weights = results.get("format", _BF16)
    return results["shape"] if weights == _BF16 else f"{results['shape']} {weights}"


def markdown(results: dict) -> str:
    """The table of one model: a row per load, a column per server, the ratio last."""
    peers = list(results["start_s"])
    lines = [
        f"| {heading(results)} | {' | '.join(peers)} | ratio to the best other |",
        "|---|" + "---:|" * (len(peers) + 1),
    ]
    for scenario, by_peer in results["scenarios"].items():
        measured = rates(results, scenario)
        cells = [_cell(by_peer[peer], measured[peer]) for peer in peers]
        over = ratio(measured)
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
    """The table of a machine: a column per model, a row per load with all servers' tokens/s and our ratio."""
    peers = [OURS, *sorted({peer for results in files for peer in results["start_s"]} - {OURS})]
    scenarios = list(dict.fromkeys(scenario for results in files for scenario in results["scenarios"]))
    rows = [[scenario, *(_rates_cell(results, scenario, peers) for results in files)] for scenario in scenarios]
    if any(over := [_over_bf16(results, files) for results in files]):
        rows.append(["ours over ours in bf16", *over])
    rows += [
        ["largest gap over the usual", *(_each(_largest_gaps(results), peers, ".1f") for results in files)],
        ["start, s", *(_each(results["start_s"], peers, ".1f") for results in files)],
        ["memory, MiB", *(_each(results["memory_mib"], peers, ",.0f") for results in files)],
    ]
    head = [" / ".join(peers), *(heading(results) for results in files)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---", *["---:"] * len(files)], *rows))


def _parameters(shape: str) -> float:
    return float(shape[:-1]) * {"m": 1e6, "b": 1e9}[shape[-1]]


def _rates_cell(results: dict, scenario: str, peers: list[str]) -> str:
    measured = rates(results, scenario)
    over = ratio(measured)
    failed = sum(run["errors"] for runs in results["scenarios"][scenario].values() for run in runs)
    cell = _each(measured, peers, ",.0f") + ("" if over is None else f" (**{over:.2f}**)")
    return cell + (f", {failed} failed" if failed else "")


def _over_bf16(results: dict, files: list[dict]) -> str:
    """By load: our rate over ours in bfloat16 at the same shape; empty for bfloat16, or if either is missing."""
    base = next((other for other in files if heading(other) == results["shape"]), None)
    if base is None or base is results:
        return ""
    pairs = [(rates(results, name).get(OURS), rates(base, name).get(OURS)) for name in results["scenarios"]]
    return " / ".join(f"{mine / before:.2f}" for mine, before in pairs if mine and before)


def _largest_gaps(results: dict) -> dict[str, float]:
    """By server: the largest gap between tokens over the median gap, as median over rounds; the worst load counts."""
    measured: dict[str, float] = {}
    for by_peer in results["scenarios"].values():
        for peer, runs in by_peer.items():
            measured[peer] = max(measured.get(peer, 0.0), median([run["largest_gap_over_median"] for run in runs]))
    return measured


def _each(values: dict[str, float], peers: list[str], form: str) -> str:
    return " / ".join(format(values[peer], form) if peer in values else "–" for peer in peers)


def read_results(file: Path) -> list[dict]:
    """The results of one machine, smallest model first, and bfloat16 before formats of fewer bits."""
    measured = json.loads(file.read_text()).values()
    return sorted(measured, key=lambda results: (_parameters(results["shape"]), heading(results) != results["shape"]))


def main(
    file: Annotated[Path, typer.Argument(help="What bench.compare wrote with --out on one machine.")],
) -> None:
    """Print a table of all models in FILE, then one of each."""
    results = read_results(file)
    print("\n\n".join([summary(results), *(markdown(each) for each in results)]))


if __name__ == "__main__":
    typer.run(main)
