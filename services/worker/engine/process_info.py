"""State of processes that are not our children, from /proc."""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import dataclass
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class ProcessInfo:
    """A snapshot; see proc_pid_stat(5)."""

    state: str  # R running, S sleeping, D in the kernel, T stopped, Z zombie
    cpu_s: float
    wait_status: int  # defined for zombies only

    @classmethod
    def read(cls, pid: int) -> ProcessInfo | None:
        """Read the state of process `pid`; None when it is gone."""
        try:
            text = Path(f"/proc/{pid}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return None
        fields = text[text.rindex(")") + 2 :].split()  # the name before may hold blanks and brackets
        ticks = int(fields[11]) + int(fields[12])
        return cls(fields[0], ticks / _TICKS_PER_S, int(fields[49]))


def describe_exit(pid: int) -> tuple[str, int | None]:
    """Return (text, signal) of a process that just died; only the text if its parent has reaped it."""
    info = ProcessInfo.read(pid)
    if info is None or info.state != "Z":
        return f"process {pid} is gone, exit status unknown", None
    return describe_status(pid, os.waitstatus_to_exitcode(info.wait_status))


def describe_status(pid: int, status: int) -> tuple[str, int | None]:
    """Return (text, signal) of an exit status; a negative status is a signal."""
    if status < 0:
        return f"process {pid} was killed by {signal.Signals(-status).name}", -status
    return f"process {pid} exited with status {status}", None


def reap_adopted(pids: list[int]) -> None:
    """Reap adopted orphans: a server that is a container's first process inherits them."""
    for pid in pids:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
