"""Detects when the machine itself stands still, which looks like a slow step in every process on it.

    python -m bench.standstill --seconds 60

A host stops a virtual machine that has used more than its CPU share, or gives its cores to other machines for a time.
On every core, a process with real-time priority sleeps for a few milliseconds in a loop; if it wakes late, no process
could run on that core. Real-time priority needs root or CAP_SYS_NICE.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

SLEEP_S = 0.004
LATE_S = 0.005  # longer than interrupts and the probe itself take
PRIORITY = 50


@dataclass(frozen=True)
class Watch:
    """Running probes and their files, with a line per standstill: start and end, by `time.perf_counter`."""

    probes: tuple[subprocess.Popen[bytes], ...]
    files: tuple[Path, ...]

    def held_up_ms(self, began: float, ended: float) -> float | None:
        """The longest total standstill of any core in that time; None if a probe could not run."""
        if any(probe.poll() is not None for probe in self.probes):
            return None
        return max(1e3 * sum(_parts(file, began, ended)) for file in self.files)


def _parts(file: Path, began: float, ended: float) -> Iterator[float]:
    for line in file.read_text().splitlines():
        start, end = map(float, line.split())
        yield max(0.0, min(end, ended) - max(start, began))


@contextlib.contextmanager
def watch(cores: Iterable[int]) -> Iterator[Watch]:
    """Run probes on these cores while the block runs. A probe without permission prints why to stderr and ends."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        probes, files = [], []
        for core in cores:
            file = Path(folder, str(core))
            file.touch()
            probe = subprocess.Popen([sys.executable, __file__, "--core", str(core), "--file", str(file)])
            stack.callback(probe.wait)
            stack.callback(probe.kill)
            probes.append(probe)
            files.append(file)
        yield Watch(tuple(probes), tuple(files))


def probe(core: int, file: Path) -> None:
    """Record the standstills of this core until killed."""
    try:
        os.sched_setaffinity(0, {core})
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(PRIORITY))
    except OSError as error:
        sys.exit(f"standstills of core {core} are not seen: {error}")
    with file.open("w", buffering=1) as lines:
        while True:
            slept = time.perf_counter()
            time.sleep(SLEEP_S)
            woke = time.perf_counter()
            if woke - slept > SLEEP_S + LATE_S:
                print(slept + SLEEP_S, woke, file=lines)


def main() -> None:
    """Watch for some seconds, and print the standstills."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--core", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.core is not None:
        probe(options.core, options.file)
    with watch(os.sched_getaffinity(0)) as watched:
        for second in range(int(options.seconds)):
            began = time.perf_counter()
            time.sleep(1)
            held_up = watched.held_up_ms(began, time.perf_counter())
            if held_up is None:
                raise SystemExit("not seen")
            if held_up:
                print(f"second {second}: {held_up:.0f} ms")


if __name__ == "__main__":
    main()
