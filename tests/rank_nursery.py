"""Forks a rank for each line of its input, the rank's environment, and answers with the rank's process id."""

from __future__ import annotations

import json
import os
import runpy
import sys
from contextlib import suppress

import torch

from services.common.lifeline import PARENT_VARIABLE
from services.worker.protocol.rank_config import SETTINGS_VARIABLE, RankSettings
from services.worker.rank import loading, process  # noqa: F401 - ranks find them imported


def main() -> None:
    """Fork until the input ends; ranks that still run end with this process."""
    while line := sys.stdin.readline():
        with suppress(ChildProcessError):  # without ranks
            while os.waitpid(-1, os.WNOHANG)[0]:
                continue
        if pid := os.fork():
            print(pid, flush=True)  # noqa: T201
        else:
            os._exit(_run(json.loads(line)))


def _run(environment: dict[str, str]) -> int:
    """Be the rank; return its exit status."""
    os.dup2(2, 1)  # the answers' pipe
    os.environ.clear()
    os.environ.update(environment | {PARENT_VARIABLE: str(os.getppid())})
    torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    module = RankSettings.from_json(environment[SETTINGS_VARIABLE]).config.rank_module
    try:
        runpy.run_module(module, run_name="__main__")
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


if __name__ == "__main__":
    main()
