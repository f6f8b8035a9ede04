"""Starts the ranks as children, several of them below torchrun, and keeps the end of what they print."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

from services.common.cores import usable_cores
from services.worker.ipc.lifeline import PARENT_VARIABLE
from services.worker.process.output import RankOutput
from services.worker.protocol.rank_config import SETTINGS_VARIABLE, RankSettings

_LINE_BYTES = 1 << 20
_MIB = 1 << 20
_ONLY_RANK = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}  # as torchrun says it


def rank_environment(settings: RankSettings, cores: int) -> dict[str, str]:
    """Return the environment of the ranks, and of torchrun above several."""
    threads = max(1, cores // settings.config.ranks)
    defaults = {
        "OMP_NUM_THREADS": str(threads),
        # OpenMP threads that spin while idle take the cores from the server and the other ranks: with anything else
        # running, a step with two spinning threads took ten times as long as with two sleeping ones.
        "OMP_WAIT_POLICY": "PASSIVE",
        # Tensors of 2 MiB and more lie in pages of that size: blocks of a large cache are found sooner.
        "THP_MEM_ALLOC_ENABLE": "1",
        # A step's activations lie where the last step's did: memory that goes back to the kernel in between comes
        # again page by page, each filled with zeros, which was a tenth of the time of a prompt.
        "MALLOC_MMAP_THRESHOLD_": str(32 * _MIB),  # glibc takes no more
        "MALLOC_TRIM_THRESHOLD_": str(1024 * _MIB),
        "MALLOC_TOP_PAD_": str(64 * _MIB),
    }
    return {
        **defaults,
        **os.environ,
        SETTINGS_VARIABLE: settings.to_json(),
        PARENT_VARIABLE: str(os.getpid()),
        "PYTHONUNBUFFERED": "1",
    }


def launch_command(ranks: int, module: str) -> list[str]:
    """Return the command line: the only rank itself, or torchrun for several.

    A single rank meets nobody, and torchrun brings torch: 145 MiB of a process that only waits, and its import before
    the rank's own.
    """
    if ranks == 1:
        return [sys.executable, "-m", module]
    # The server sees a rank's end first, and reads its exit status before torchrun looks and reaps it.
    options = ["--standalone", f"--nproc-per-node={ranks}", "--max-restarts=0", "--monitor-interval=1"]
    return [sys.executable, "-m", "services.worker.process.launch", *options, "-m", module]


class Launcher:
    """The server's child: the only rank, or torchrun for several."""

    def __init__(self, process: asyncio.subprocess.Process, ranks: int) -> None:
        self._process = process
        self.is_rank = ranks == 1
        self.name = "rank 0" if self.is_rank else "torchrun"
        self._output = RankOutput()
        self._reader = asyncio.create_task(self._read(), name="rank-output")

    @classmethod
    async def spawn(cls, settings: RankSettings) -> Launcher:
        """Start the ranks of the group."""
        ranks = settings.config.ranks
        process = await asyncio.create_subprocess_exec(
            *launch_command(ranks, settings.config.rank_module),
            env=rank_environment(settings, usable_cores()) | (_ONLY_RANK if ranks == 1 else {}),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C in a terminal is for the server, which then stops the ranks
            limit=_LINE_BYTES,
        )
        return cls(process, ranks)

    @property
    def output_tail(self) -> str:
        """The last lines that it or a rank printed."""
        return self._output.tail

    def kill(self) -> None:
        """Send SIGKILL; ranks that still run die with their parent."""
        self._signal(signal.SIGKILL)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self._signal(signal.SIGTERM)

    async def wait(self) -> int:
        """Wait until it has exited and its output is read; return its exit status (negative: signal)."""
        status = await self._process.wait()
        await self._reader
        return status

    def _signal(self, number: signal.Signals) -> None:
        if self._process.returncode is None:
            self._process.send_signal(number)

    async def _read(self) -> None:
        stdout = self._process.stdout
        assert stdout is not None
        while True:
            try:
                raw = await stdout.readline()
            except ValueError:  # readline has dropped it
                self._output.add(f"[a line of more than {_LINE_BYTES:,} bytes]")
                continue
            if not raw:
                break
            self._output.add(raw.decode(errors="replace").rstrip())
        self._output.end()
