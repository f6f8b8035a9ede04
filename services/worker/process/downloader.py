"""Downloads a model in a process of its own, which ends when the caller is cancelled.

In the server the hub's library could not be stopped: the interpreter waits at its end for the library's threads, which
each finish their file. The process is `python -m services.worker.process.downloader MODEL REVISION`.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from services.common.lifeline import PARENT_VARIABLE, die_with_parent
from services.compute.model.loading.hub import Download, resolve_model
from services.compute.model.spec import ModelError

_LINE_BYTES = 16 << 20  # names and sizes of all files
_UNFINISHED = ".incomplete"  # suffix that the hub's library gives to incomplete files


async def download(model: str, revision: str, begins: Callable[[Download], None]) -> Path:
    """Return the folder of a hub's model after its download; calls `begins` with the files. Raises ModelError.

    A cancellation ends the download at once and deletes incomplete files.
    """
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "services.worker.process.downloader", model, revision),
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


def main() -> None:
    """Print a line of JSON when the download begins, and a last one with the model's folder or the error."""
    die_with_parent()
    model, revision = sys.argv[1:]

    def begins(download: Download) -> None:
        _say(begins={"model": model, "blobs": str(download.blobs), "sizes": dict(download.sizes)})

    try:
        folder = resolve_model(model, revision, begins)
    except ModelError as error:
        _say(error=str(error))
    else:
        _say(folder=str(folder))


def _say(**fields: object) -> None:
    sys.stdout.write(f"{json.dumps(fields)}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
