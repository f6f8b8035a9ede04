"""Downloads a model in a process of its own, which ends when the caller is cancelled."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from services.common.lifeline import PARENT_VARIABLE
from services.compute.model.loading.hub import Download
from services.compute.model.spec import ModelError

_LINE_BYTES = 16 << 20  # names and sizes of all files
_UNFINISHED = ".incomplete"  # suffix that the hub's library gives to incomplete files


async def download(model: str, revision: str, begins: Callable[[Download], None]) -> Path:
    """Return the folder of a hub's model after its download; calls `begins` with the files. Raises ModelError.

    A cancellation ends the download at once and deletes incomplete files.
    """
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "services.worker.process.download", model, revision),
        env={**os.environ, PARENT_VARIABLE: str(os.getpid()), "HF_HUB_DISABLE_PROGRESS_BARS": "1"},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,  # Ctrl-C in a terminal reaches the server only, which then ends this process
        limit=_LINE_BYTES,
    )
    assert process.stdout is not None
    try:
        async for line in process.stdout:
            match json.loads(line):
                case {"begins": {"model": name, "blobs": blobs, "sizes": sizes}}:
                    begins(Download(name, Path(blobs), sizes))
                case {"folder": folder}:
                    await process.wait()
                    return Path(folder)
                case {"error": error}:
                    raise ModelError(error)
        raise ModelError(f"{model}: the download ended with status {await process.wait()}")
    finally:
        if process.returncode is None:
            _end(process.pid)
        await process.wait()


def _end(pid: int) -> None:
    """Kill the process and delete its incomplete files only: other processes may download into the same folder."""
    os.kill(pid, signal.SIGSTOP)  # it opens and closes no more files
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
    opened = [number.readlink() for number in Path(f"/proc/{pid}/fd").glob("*")]
    os.kill(pid, signal.SIGKILL)
    for path in opened:
        if path.name.endswith(_UNFINISHED):
            path.unlink(missing_ok=True)
