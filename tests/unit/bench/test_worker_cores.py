"""Workers with cores of their own, and engines that are recorded while they serve."""

from __future__ import annotations

import json
import os
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest
import typer

from bench.served_engine import open_served
from bench.worker_cores import WorkerCores
from services.cli.stack.default_model import TINY_MODEL
from services.compute.ranks.config import RankGroupConfig


def test_first_cores_are_workers_own_and_one_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {2, 3, 5, 7})
    cores = WorkerCores.divide(3)
    assert (sorted(cores.workers), sorted(cores.others), cores.own) == ([2, 3, 5], [7], True)
    assert (cores.threads(1), cores.threads(2), cores.threads(4)) == (3, 1, 1)
    shared = WorkerCores.divide(0)
    assert (sorted(shared.workers), sorted(shared.others), shared.own) == ([2, 3, 5, 7], [2, 3, 5, 7], False)
    for wrong in (-1, 4):
        with pytest.raises(typer.BadParameter, match="expected 0 to 3"):
            WorkerCores.divide(wrong)


def test_python_of_workers_runs_on_their_cores_with_their_threads(tmp_path: Path) -> None:
    first = min(os.sched_getaffinity(0))
    python = WorkerCores(frozenset({first}), frozenset()).write_python(tmp_path / "python", 1)
    code = (
        "import json, os, sys; print(json.dumps([[*os.sched_getaffinity(0)], os.environ['OMP_NUM_THREADS'], sys.argv]))"
    )
    ran = subprocess.run([python, "-c", code, "a b"], capture_output=True, text=True, check=True)
    assert json.loads(ran.stdout) == [[first], "1", ["-c", "a b"]]


async def test_served_engine_records_each_step_with_its_rows() -> None:
    config = RankGroupConfig(str(TINY_MODEL), kv_tokens=4096, max_running=4, max_model_len=512)
    async with open_served(config, WorkerCores.divide(0)) as engine:
        for first in (3, 103):
            arrived, steps = await engine.run([[first + n] * 24 for n in range(2)], 4)
            assert [step.n_rows for step in steps] == [48, 2, 2, 2]
            assert all(before.ended < after.ended for before, after in pairwise(steps))
            assert arrived < steps[0].ended
