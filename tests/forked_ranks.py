"""Ranks that are forked from a process that has imported torch: each rank would import for two seconds.

For tests of what ranks do; other tests start ranks as workers do.
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
from contextlib import suppress

from services.common.cores import usable_cores
from services.worker.process.launcher import rank_environment
from services.worker.protocol.rank_config import RankSettings


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
    command = [sys.executable, "-m", "tests.rank_nursery"]
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
