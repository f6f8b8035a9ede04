"""Has a process of its own download a model, and ends it whenever nobody waits for the model any more."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from services.worker.ipc.lifeline import PARENT_VARIABLE
from services.worker.model.loading.hub import Download
from services.worker.model.spec import ModelError

_LINE_BYTES = 16 << 20  # names and sizes of all files
_UNFINISHED = ".incomplete"  # how the hub's library calls a file until all of it is there


async def download(model: str, revision: str, begins: Callable[[Download], None]) -> Path:
    """Return the folder of a hub's model, downloaded once; `begins` is told what there is. Raises ModelError.

    Cancelled, it ends at once and leaves no part of a file.
    """
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "services.worker.process.download", model, revision),
        env={**os.environ, PARENT_VARIABLE: str(os.getpid()), "HF_HUB_DISABLE_PROGRESS_BARS": "1"},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,  # Ctrl-C in a terminal is for the server, which then ends it
        limit=_LINE_BYTES,
    )
    assert process.stdout is not None
    try:
        async for line in process.stdout:
            match json.loads(line):
                case {"begins": {"model": name, "blobs": blobs, "sizes": sizes}}:
                    begins(Download(name, Path(blobs), sizes))
                case {"folder": folder}:
                    return Path(folder)
                case {"error": error}:
                    raise ModelError(error)
        raise ModelError(f"{model}: the download ended with status {await process.wait()}")
    finally:
        if process.returncode is None:
            _end(process.pid)
        await process.wait()


def _end(pid: int) -> None:
    """Kill it; what it was writing goes, which no later download would go on with. Others may write beside it."""
    os.kill(pid, signal.SIGSTOP)  # opens nothing more
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
    unfinished = [path for path in _opened(pid) if path.name.endswith(_UNFINISHED)]
    os.kill(pid, signal.SIGKILL)
    for path in unfinished:
        path.unlink(missing_ok=True)


def _opened(pid: int) -> list[Path]:
    """The files that a process has open; none of one that has ended."""
    found = []
    for number in Path(f"/proc/{pid}/fd").glob("*"):
        try:
            found.append(number.readlink())
        except OSError:  # closed meanwhile
            continue
    return found
