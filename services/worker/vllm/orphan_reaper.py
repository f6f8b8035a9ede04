"""Ends vLLM's processes when ours dies without doing it: its scheduler and its ranks do not notice a lost parent."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterable


class OrphanReaper:
    """A process that reads process ids, line by line, and kills those of the last line when its input ends."""

    def __init__(self) -> None:
        # -I and -S: it starts in milliseconds, and imports nothing of ours. A session of its own outlives the server's.
        command = [sys.executable, "-I", "-S", __file__]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, text=True, start_new_session=True)

    def watch(self, pids: Iterable[int]) -> None:
        """Kill these processes, and no others, if ours dies; a negative id is that of a process group."""
        assert self._process.stdin is not None
        print(*pids, file=self._process.stdin, flush=True)

    def close(self) -> None:
        """End the process; it kills nothing."""
        self.watch(())
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def main() -> None:
    """Read until the end of the input."""
    pids: list[int] = []
    for line in sys.stdin:
        pids = [int(pid) for pid in line.split()]
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
