"""Engines whose ranks are forked from a process that has imported torch: each rank would import for two seconds.

For tests of what ranks compute; the launcher of ranks is that of every other test.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

from services.common.cores import usable_cores
from services.worker.engine.base import Engine
from services.worker.native.opening import open_native
from services.worker.process.launcher import Launcher, rank_environment
from services.worker.protocol.rank_config import RankSettings
from services.worker.settings import WorkerSettings
from tests.integration.worker_engine.engines import serving
from tests.unit.worker.engine.stand_ins import NoObserver


@asynccontextmanager
async def forked(folder: Path, **settings: Any) -> AsyncGenerator[Engine, None]:
    """The native engine of a model of 128 positions, which computes chunks of 13 rows on forked ranks."""
    settings |= {"model": str(folder), "dtype": "float32", "max_model_len": 128, "max_batched_tokens": 13}
    chosen = WorkerSettings(**settings)
    with patch.object(Launcher, "spawn", ForkedRanks.spawn):
        async with serving(await open_native(chosen, folder, NoObserver(), NoObserver())) as engine:
            yield engine


class ForkedRanks:
    """The ranks of a group, with the methods of `Launcher`."""

    is_rank = False
    name = "the process that forks ranks"
    output_tail = "it prints to the error output of the tests"

    def __init__(self, pids: list[int]) -> None:
        self._pids = pids
        self._ends = [asyncio.create_task(asyncio.to_thread(_wait, os.pidfd_open(pid))) for pid in pids]

    @classmethod
    async def spawn(cls, settings: RankSettings) -> ForkedRanks:
        environment = rank_environment(settings, usable_cores()) | {"WORLD_SIZE": str(settings.config.ranks)}
        ranks = range(settings.config.ranks)
        return cls([_fork(environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in ranks])

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    async def wait(self) -> int:
        await asyncio.gather(*self._ends)
        return 0

    def _signal(self, number: signal.Signals) -> None:
        for pid in self._pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)


def _wait(pidfd: int) -> None:
    select.select([pidfd], [], [])
    os.close(pidfd)


@functools.cache
def _nursery() -> subprocess.Popen[str]:
    """The process that has imported torch. It ends with its input, and its ranks with it."""
    command = [sys.executable, "-m", "tests.integration.worker_engine.nursery"]
    # OpenMP reads the policy when torch is imported; see `rank_environment`.
    environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _fork(environment: dict[str, str]) -> int:
    """Return the process id of a new rank."""
    nursery = _nursery()
    assert nursery.stdin
    assert nursery.stdout
    nursery.stdin.write(json.dumps(environment) + "\n")
    nursery.stdin.flush()
    return int(nursery.stdout.readline())
