"""Measures our collectives (shared memory, bfloat16) against gloo's.

python -m bench.collectives [--ranks 2] [--json FILE]
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Annotated, Any

import typer

from bench.reading import Reading, lower, write_readings
from services.common.cores import usable_cores
from services.worker.process.launcher import launch_command


def measure(ranks: int, repeats: int) -> list[dict[str, Any]]:
    """Run `bench.collectives_rank` on this many ranks, and return its times by size."""
    # As in a worker: idle OpenMP threads must not take cores from other ranks.
    defaults = {"OMP_NUM_THREADS": str(max(1, usable_cores() // ranks)), "OMP_WAIT_POLICY": "PASSIVE"}
    command = [*launch_command(ranks, "bench.collectives_rank"), str(repeats)]
    ran = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env={**defaults, **os.environ})
    timings: list[dict[str, Any]] = json.loads(ran.stdout)
    return timings


def show(ranks: int, timings: list[dict[str, Any]]) -> str:
    """Format the times as a table."""
    lines = [f"all-reduce, {ranks} ranks, bfloat16, µs (median / p99)"]
    for t in timings:
        ours = f"{t['shared_memory_p50']:9,.0f} /{t['shared_memory_p99']:9,.0f}"
        gloo = f"{t['gloo_p50']:9,.0f} /{t['gloo_p99']:9,.0f}"
        ratio = t["gloo_p50"] / t["shared_memory_p50"]
        lines.append(f"{t['n_bytes'] >> 10:6d} KiB   shared memory {ours}   gloo {gloo}   gloo takes {ratio:4.1f}x")
    return "\n".join(lines)


def readings(ranks: int, timings: list[dict[str, Any]]) -> list[Reading]:
    """All-reduces by size, ours and gloo's."""
    name = f"collectives/{ranks} ranks"
    return [
        lower(f"{name}, {timing['n_bytes'] >> 10} KiB/all-reduce {carrier} {cut}", timing[f"{key}_{cut}"], "us")
        for timing in timings
        for carrier, key, cut in (
            ("ours", "shared_memory", "p50"),
            ("ours", "shared_memory", "p99"),
            ("gloo", "gloo", "p50"),
        )
    ]


def main(
    ranks: Annotated[int, typer.Option(min=2, max=16, help="Tensor-parallel ranks.")] = 2,
    repeats: Annotated[int, typer.Option(min=1, help="All-reduces per size.")] = 300,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the readings there.")] = None,
) -> None:
    """Compare all-reduces with gloo's."""
    timings = measure(ranks, repeats)
    print(show(ranks, timings))
    if json_file is not None:
        write_readings(json_file, readings(ranks, timings))


if __name__ == "__main__":
    typer.run(main)
