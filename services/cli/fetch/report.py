"""Tells the routers of an installation how far a download is, in an init container of a worker's pod."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from services.cli.fetch.download import size_of_folder
from services.common.download_report import DownloadProgress, reporting
from services.common.settings import PREFIX, ServiceSettings

_MODEL = f"{PREFIX}SERVED_MODEL_NAME"


@dataclass(frozen=True, slots=True)
class FolderDownload:
    """Implements DownloadProgress for the files of a folder."""

    folder: Path
    total: int

    @property
    def done(self) -> int:
        """Bytes that are there; files of the hub's library may be among them."""
        return min(self.total, size_of_folder(self.folder))


@contextmanager
def reported(download: DownloadProgress) -> Iterator[None]:
    """Report the download each second while the block runs, as that of the model RYZANSTEIN_SERVED_MODEL_NAME.

    Without this variable there is no installation to report to. A Redis that is away hinders no download.
    """
    model = os.environ.get(_MODEL, "")
    if not model:
        yield
        return
    settings, loop, ended = ServiceSettings(), asyncio.new_event_loop(), asyncio.Event()

    async def report() -> None:
        async with reporting(settings, model) as begins:
            begins(download)
            await ended.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(report(),), name="report", daemon=True)
    thread.start()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join()
        loop.close()
