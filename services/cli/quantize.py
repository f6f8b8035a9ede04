"""`ryzanstein quantize`: starts the worker's quantizer and draws its progress."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from services.cli.errors import CommandError

_PHASES = {"survey": "choosing bits", "quantize": "quantizing layers"}
_NEEDED = ("torch", "safetensors", "tokenizers")


def run(arguments: Sequence[str], out: str) -> None:
    """Quantize with the arguments of `services.worker.quantizer`; raises CommandError."""
    if missing := [name for name in _NEEDED if not find_spec(name)]:
        install = f"{sys.executable} -m pip install 'ryzanstein[worker]'"
        raise CommandError(f"quantize needs the extra worker ({', '.join(missing)} missing): {install}")
    command = [sys.executable, "-m", "services.worker.quantizer", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            error = _follow(_lines(process))
        except KeyboardInterrupt as interrupt:
            process.wait()  # the same Ctrl-C ends it
            raise CommandError("interrupted; the same command goes on behind the last finished layer") from interrupt
    if error or process.returncode:
        raise CommandError(error or f"the quantizer ended with status {process.returncode}; its output is above")
    print(out)  # noqa: T201


def _lines(process: subprocess.Popen[str]) -> Iterator[dict[str, Any]]:
    assert process.stdout is not None
    yield from map(json.loads, process.stdout)


def _follow(lines: Iterator[dict[str, Any]]) -> str:
    """Draw the progress; return the message of an error, "" if there is none."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=Console(stderr=True)) as bar:
        tasks = {}
        for line in lines:
            if "error" in line:
                return str(line["error"])
            phase, done, of = line["phase"], line["done"], line["of"]
            if phase not in tasks:
                tasks[phase] = bar.add_task(_PHASES[phase], total=of)
            bar.update(tasks[phase], completed=done)
    return ""
