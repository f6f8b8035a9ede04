"""vLLM's processes: its scheduler, which is our child, and that one's children, the ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from multiprocessing.process import BaseProcess

import psutil


def families(processes: Iterable[BaseProcess]) -> list[psutil.Process]:
    """Return the processes and their descendants, parents first; of one that has ended, none."""
    members: list[psutil.Process] = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            parent = psutil.Process(process.pid)
            members += [parent, *parent.children(recursive=True)]
    return members


def kill(processes: Iterable[BaseProcess], family: Iterable[psutil.Process]) -> None:
    """Kill our children `processes`, and the rest of their `family`."""
    for process in processes:
        process.kill()
    for member in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()


def reap(processes: Iterable[BaseProcess], family: Iterable[psutil.Process], within_s: float) -> None:
    """Wait until the killed have ended.

    Those whose parent was killed are children of a container's first process, which is ours: unless it waits for them,
    they stay as zombies.
    """
    ours = set()
    for process in processes:
        process.join(within_s)
        ours.add(process.pid)
    psutil.wait_procs([member for member in family if member.pid not in ours], timeout=within_s)
