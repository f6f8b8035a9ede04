"""`ryzanstein convert`: the worker's converter."""

from __future__ import annotations

import re

from services.cli.errors import CommandError
from services.cli.worker_program import WorkerProgram

CONVERTER = WorkerProgram(
    command="convert",
    module="services.tools.converter",
    extras="worker,convert",
    needed=("gguf", "safetensors", "tokenizers", "torch"),
    phases={"convert": "converting tensors"},
    interrupted="nothing was written",
)
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(MB|GB|MIB|GIB)", re.IGNORECASE)
_UNITS = {"MB": 10**6, "GB": 10**9, "MIB": 2**20, "GIB": 2**30}


def parse_size(text: str) -> int:
    """Return a size such as 5GB in bytes; raises CommandError."""
    match = _SIZE.fullmatch(text.strip())
    size = int(float(match[1]) * _UNITS[match[2].upper()]) if match else 0
    if not size:
        raise CommandError(f"--shard-size {text}: expected a number above 0 with MB, GB, MiB or GiB, such as 5GB")
    return size
