"""The collectives of the ranks as readings: `ryzanstein bench collectives` on the bundled model.

python -m bench.collectives --json FILE
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from bench.reading import Reading, lower, write_readings
from services.cli.stack.options import BUNDLED_MODEL


def readings(report: dict[str, Any]) -> list[Reading]:
    """All-reduces by size, ours and gloo's on the same tensors, and communication's share of a decode step."""
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
    json_file: Annotated[Path, typer.Option("--json", help="Write the readings there.")],
    ranks: int = 2,
    repeats: int = 300,
) -> None:
    """Measure the collectives and a decode step of one sequence."""
    options = ["--ranks", str(ranks), "--repeats", str(repeats), "--model", str(BUNDLED_MODEL), "--json"]
    command = [str(Path(sys.executable).with_name("ryzanstein")), "bench", "collectives", *options]
    ran = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    write_readings(json_file, readings(json.loads(ran.stdout)))


if __name__ == "__main__":
    typer.run(main)
