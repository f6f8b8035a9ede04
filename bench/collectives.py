"""Measures our collectives (shared memory, bfloat16) against gloo's, and predicts the speedup of more ranks.

python -m bench.collectives --model CHECKPOINT [--ranks 2] [--json FILE]
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Annotated, Any

import typer

from bench.reading import Reading, lower, write_readings
from services.cli.stack.default_model import TINY_MODEL
from services.common.cores import usable_cores
from services.worker.process.launcher import launch_command


def measure(ranks: int, options: list[str]) -> dict[str, Any]:
    """Run `bench.collectives_rank` on this many ranks, and return its report."""
    # As in a worker: idle OpenMP threads must not take cores from other ranks.
    defaults = {"OMP_NUM_THREADS": str(max(1, usable_cores() // ranks)), "OMP_WAIT_POLICY": "PASSIVE"}
    command = [*launch_command(ranks, "bench.collectives_rank"), *options]
    ran = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env={**defaults, **os.environ})
    report: dict[str, Any] = json.loads(ran.stdout)
    return report


def show(report: dict[str, Any]) -> str:
    """Format the report as tables."""
    lines = [f"all-reduce, {report['ranks']} ranks, bfloat16, µs (median / p99)"]
    for t in report["timings"]:
        ours = f"{t['shared_memory_p50']:9,.0f} /{t['shared_memory_p99']:9,.0f}"
        gloo = f"{t['gloo_p50']:9,.0f} /{t['gloo_p99']:9,.0f}"
        ratio = t["gloo_p50"] / t["shared_memory_p50"]
        lines.append(f"{t['n_bytes'] >> 10:6d} KiB   shared memory {ours}   gloo {gloo}   gloo takes {ratio:4.1f}x")
    if step := report["step"]:
        lines.append(
            f"decode step, batch {step['batch']}: forward {step['forward_us']:,.0f} µs "
            f"+ communication {step['communication_us']:,.0f} + sample {step['sample_us']:,.0f}"
        )
    lines.append(f"communication is {report['share']:.1%} of a decode step at {report['ranks']} ranks")
    lines += [f"predicted over one rank, {n} ranks: {gain:.2f}x" for n, gain in report["speedup"].items()]
    return "\n".join(lines)


def readings(report: dict[str, Any]) -> list[Reading]:
    """All-reduces by size, ours and gloo's, and the share of communication in a decode step."""
    name = f"collectives/{report['ranks']} ranks"
    found = [
        lower(f"{name}, {timing['n_bytes'] >> 10} KiB/all-reduce {carrier} {cut}", timing[f"{key}_{cut}"], "us")
        for timing in report["timings"]
        for carrier, key, cut in (
            ("ours", "shared_memory", "p50"),
            ("ours", "shared_memory", "p99"),
            ("gloo", "gloo", "p50"),
        )
    ]
    return [*found, lower(f"{name}/share of a decode step", 100 * report["share"], "%")]


def main(
    ranks: Annotated[int, typer.Option(min=2, max=16, help="Tensor-parallel ranks.")] = 2,
    model: Annotated[Path, typer.Option(help="Checkpoint folder whose decode steps are measured.")] = TINY_MODEL,
    share: Annotated[
        float | None, typer.Option(min=0, max=0.999, help="Instead of --model: communication's share of a decode step.")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, max=256, help="Sequences in a decode step.")] = 1,
    repeats: Annotated[int, typer.Option(min=1, help="All-reduces per size.")] = 300,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the readings there.")] = None,
) -> None:
    """Compare all-reduces with gloo's, and predict what more ranks bring."""
    if not (model / "config.json").is_file():
        raise typer.BadParameter(f"{model}: no config.json there", param_hint="--model")
    step = ["--model", str(model)] if share is None else ["--share", str(share)]
    report = measure(ranks, ["--repeats", str(repeats), "--batch", str(batch), *step])
    print(show(report))
    if json_file is not None:
        write_readings(json_file, readings(report))


if __name__ == "__main__":
    typer.run(main)
