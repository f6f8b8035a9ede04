"""`ryzanstein quantize`: the worker's quantizer."""

from __future__ import annotations

from services.cli.worker_program import WorkerProgram

QUANTIZER = WorkerProgram(
    command="quantize",
    module="services.tools.quantizer",
    extras="worker",
    needed=("torch", "safetensors", "tokenizers"),
    phases={"survey": "choosing bits", "quantize": "quantizing layers"},
    interrupted="the same command goes on behind the last finished layer",
)
