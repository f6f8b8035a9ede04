"""Gives workers cores of their own, and the other cores to everything else."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

import typer

from services.common.cores import usable_cores

_PYTHON = """#!{python}
import os, sys
os.sched_setaffinity(0, {cores})
os.environ["OMP_NUM_THREADS"] = "{threads}"
os.execv({python!r}, [{python!r}, *sys.argv[1:]])
"""


@dataclass(frozen=True, slots=True)
class WorkerCores:
    """The numbers of the cores of workers, and of those for everything else."""

    workers: frozenset[int]
    others: frozenset[int]  # the same ones where nothing is divided

    @classmethod
    def divide(cls, n_own: int) -> WorkerCores:
        """Give the first `n_own` usable cores to workers; 0: all cores are for all. Raises BadParameter."""
        usable = sorted(os.sched_getaffinity(0))
        if not 0 <= n_own < len(usable):
            limits = f"expected 0 to {len(usable) - 1}: of {len(usable)} cores one is for all but the workers"
            raise typer.BadParameter(limits, param_hint="--worker-cores")
        return cls(frozenset(usable[:n_own] or usable), frozenset(usable[n_own:]))

    @property
    def own(self) -> bool:
        """Whether only workers run on their cores."""
        return not self.workers & self.others

    @property
    def n_workers(self) -> int:
        """The number of cores that workers can use."""
        return len(self.workers) if self.own else usable_cores()

    def threads(self, n_workers: int) -> int:
        """Threads of each of `n_workers` workers."""
        return max(1, self.n_workers // n_workers)

    def write_python(self, path: Path, n_workers: int) -> Path:
        """Write a program that is this Python on the workers' cores, with the threads of one of `n_workers`."""
        path.write_text(
            _PYTHON.format(python=sys.executable, cores=sorted(self.workers), threads=self.threads(n_workers))
        )
        path.chmod(0o755)
        return path
