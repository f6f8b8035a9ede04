"""`ryzanstein merge`: the worker's merger."""

from __future__ import annotations

from services.cli.worker_program import WorkerProgram

MERGER = WorkerProgram(
    command="merge",
    module="services.tools.merger",
    extras="worker",
    needed=("safetensors", "torch"),
    phases={"merge": "merging files"},
    interrupted="nothing was written",
)
