"""Runs programs that work on checkpoints, and draws the progress that they write as lines of JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from services.cli.errors import CommandError
from services.common.extras import pip_install


@dataclass(frozen=True, slots=True)
class WorkerProgram:
    """A package that runs as `python -m`: see services/tools/program.py."""

    command: str  # subcommand of `ryzanstein`
    module: str
    extras: str  # extras of the package ryzanstein that install `needed`
    needed: tuple[str, ...]
    phases: Mapping[str, str]  # the shown text, by the phase's name
    interrupted: str  # the message after Ctrl-C

    def run(self, *, out: Path, **request: object) -> None:
        """Run the request to its end and print `out`; raises CommandError."""
        if missing := [name for name in self.needed if not find_spec(name)]:
            install = pip_install(self.extras, f"{sys.executable} -m pip")
            lack = f"({', '.join(missing)} missing)"
            raise CommandError(f"{self.command} needs the extra {self.extras} {lack}: {install}")
        command = [sys.executable, "-m", self.module, json.dumps({"out": str(out), **request})]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            try:
                error = self._follow(process.stdout)
            except KeyboardInterrupt as interrupt:
                process.wait()  # the same Ctrl-C ends it
                raise CommandError(f"interrupted; {self.interrupted}") from interrupt
        if error or process.returncode:
            raise CommandError(error or f"{self.module} ended with status {process.returncode}; its output is above")
        print(out)  # noqa: T201

    def _follow(self, lines: Iterable[str]) -> str:
        """Draw the progress; return the message of an error, "" if there is none."""
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=Console(stderr=True)) as bar:
            tasks = {}
            for line in map(json.loads, lines):
                if "error" in line:
                    return str(line["error"])
                if "note" in line:
                    bar.console.print(line["note"])
                    continue
                phase, done, of = line["phase"], line["done"], line["of"]
                if phase not in tasks:
                    tasks[phase] = bar.add_task(self.phases[phase], total=of)
                bar.update(tasks[phase], completed=done)
        return ""


QUANTIZER = WorkerProgram(
    command="quantize",
    module="services.tools.quantizer",
    extras="worker",
    needed=("torch", "safetensors", "tokenizers"),
    phases={"survey": "choosing bits", "quantize": "quantizing layers"},
    interrupted="the same command goes on behind the last finished layer",
)
CONVERTER = WorkerProgram(
    command="convert",
    module="services.tools.converter",
    extras="worker,convert",
    needed=("gguf", "safetensors", "tokenizers", "torch"),
    phases={"convert": "converting tensors"},
    interrupted="nothing was written",
)
MERGER = WorkerProgram(
    command="merge",
    module="services.tools.merger",
    extras="worker",
    needed=("safetensors", "torch"),
    phases={"merge": "merging files"},
    interrupted="nothing was written",
)
