"""How soon a killed process is known to be dead: by a lock that it held, and by the kernel's own word.

    python -m bench.death --mib 256 --mib 4096

A process fills as much memory in pages of 4 KiB, as most of a rank's are, and is killed. A pidfd is ready once that
memory has been taken apart, the lock at once (`services/worker/ipc/life_lock.py`). Nothing else runs.
"""

from __future__ import annotations

import mmap
import multiprocessing as mp
import os
import select
import signal
import threading
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from bench.stats import median
from services.worker.ipc.life_lock import LifeLock
from services.worker.ipc.segment import Segment

_PATIENCE_S = 60.0


@dataclass(frozen=True)
class Death:
    """Milliseconds from the kill until it was known."""

    by_lock: float
    by_pidfd: float


def live(server_pid: int, fd: int, mib: int, ready: Connection) -> None:
    """Hold the lock and the memory until killed."""
    LifeLock(Segment.attach(server_pid, fd), 0).hold()
    memory = mmap.mmap(-1, mib << 20)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    for at in range(0, len(memory), mmap.PAGESIZE):
        memory[at] = 1
    ready.send(True)
    signal.pause()


def measure(mib: int) -> Death:
    """One process killed."""
    segment = Segment.create("bench", mmap.PAGESIZE)
    lock = LifeLock(segment, 0)
    lock.prepare()
    here, there = mp.Pipe()
    process = mp.get_context("spawn").Process(target=live, args=(os.getpid(), segment.fd, mib, there))
    process.start()
    here.recv()
    known: list[float] = []

    def wait() -> None:
        if lock.wait_dead(_PATIENCE_S):
            known.append(time.perf_counter())

    waiting = threading.Thread(target=wait)
    waiting.start()
    pidfd = os.pidfd_open(process.pid or 0)
    killed = time.perf_counter()
    os.kill(process.pid or 0, signal.SIGKILL)
    select.select([pidfd], [], [])
    gone = time.perf_counter()
    waiting.join()
    os.close(pidfd)
    process.join()
    segment.close()
    return Death((known[0] - killed) * 1e3, (gone - killed) * 1e3)


def main(
    mib: Annotated[list[int], typer.Option(min=1, help="Of memory; may be given several times.")] = [256, 1024, 4096],  # noqa: B006
    rounds: Annotated[int, typer.Option(min=1)] = 5,
) -> None:
    """Kill processes of some sizes."""
    table = Table("MiB", "known by the lock, ms", "gone by its pidfd, ms", title=f"medians of {rounds}")
    for size in mib:
        deaths = [measure(size) for _ in range(rounds)]
        lock, pidfd = median([death.by_lock for death in deaths]), median([death.by_pidfd for death in deaths])
        table.add_row(str(size), f"{lock:.2f}", f"{pidfd:.1f}")
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
