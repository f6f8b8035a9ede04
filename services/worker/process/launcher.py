"""Starts the ranks: a single rank as a child, several below torchrun; keeps the last lines of their output."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

from services.common.cores import usable_cores
from services.common.lifeline import PARENT_VARIABLE
from services.worker.process.output import RankOutput
from services.worker.protocol.rank_config import SETTINGS_VARIABLE, RankSettings

_LINE_BYTES = 1 << 20
_MIB = 1 << 20
_ONLY_RANK = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}  # torchrun's variables


def rank_environment(settings: RankSettings, cores: int) -> dict[str, str]:
    """Return the environment of the launched process: the only rank, or torchrun, whose ranks inherit it."""
    threads = max(1, cores // settings.config.ranks)
    defaults = {
        "OMP_NUM_THREADS": str(threads),
        # Idle OpenMP threads that spin take cores from the server and the other ranks. On a busy machine a step
        # with two spinning threads took ten times as long as with two sleeping threads.
        "OMP_WAIT_POLICY": "PASSIVE",
        # Tensors of 2 MiB and more use huge pages, which makes accesses to blocks of a large cache faster.
        "THP_MEM_ALLOC_ENABLE": "1",
        # Keep freed activations for the next step. Memory returned to the kernel comes back page by page, filled
        # with zeros, which took a tenth of the time of a prompt.
        "MALLOC_MMAP_THRESHOLD_": str(32 * _MIB),  # glibc's maximum
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
    """Return the command line of the only rank, or of torchrun for several ranks.

    A single rank needs no rendezvous. Torchrun would be one more process that imports torch first and then holds
    145 MiB.
    """
    if ranks == 1:
        return [sys.executable, "-m", module]
    # --standalone would resolve `localhost` and the machine's name, which a container without /etc/hosts waits for.
    here = ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"]
    # With an interval of 1 s the server reads a dead rank's exit status before torchrun reaps the rank.
    options = [*here, f"--nproc-per-node={ranks}", "--max-restarts=0", "--monitor-interval=1"]
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
            start_new_session=True,  # Ctrl-C in a terminal reaches the server only, which then stops the ranks
            limit=_LINE_BYTES,
        )
        return cls(process, ranks)

    @property
    def output_tail(self) -> str:
        """The last lines that the launcher or a rank printed."""
        return self._output.tail

    def kill(self) -> None:
        """Send SIGKILL; ranks that still run die with their parent."""
        self._signal(signal.SIGKILL)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self._signal(signal.SIGTERM)

    async def wait(self) -> int:
        """Wait until the process has exited and its output is read; return its exit status (negative: signal)."""
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
            except ValueError:  # readline has dropped the line
                self._output.add(f"[a line of more than {_LINE_BYTES:,} bytes]")
                continue
            if not raw:
                break
            self._output.add(raw.decode(errors="replace").rstrip())
        self._output.end()
