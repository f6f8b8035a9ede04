"""KV blocks in files, which outlive the process.

    PATH/rz-kv-<identity>/<n>/.lock          held by the process that uses the folder
    PATH/rz-kv-<identity>/<n>/<2 hex>/<digest>

Workers that share PATH take folders of their own: a folder's bound and LRU are one process's. A restarted worker takes
the first free one, with its blocks. Folders that are unused for a week, as those of an earlier model, are deleted.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import shutil
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ryzanstein.v1 import worker_pb2 as pb

from services.worker.engine.kv_events import BlockPlace, KvEventLog
from services.worker.engine.state import PlaceTotals
from services.worker.kv_transfer.block_file import (
    TEMPORARY,
    DamagedError,
    layout_identity,
    read_block,
    read_name,
    write_block,
)
from services.worker.kv_transfer.block_store import BlockStore
from services.worker.kv_transfer.loader import Bandwidth
from services.worker.scheduling.places import BlockName

ASSUMED_BYTES_PER_S = 300e6  # before the first load
_MOST_FOLDERS = 1024
_FAMILY, _LOCK = "rz-kv-", ".lock"
_FORGOTTEN_S = 7 * 86_400.0  # without a use

log = logging.getLogger(__name__)


class DiskStore(BlockStore):
    """Blocks in a folder that this process has locked."""

    def __init__(
        self,
        root: Path,
        layout: pb.KvLayout,
        block_bytes: int,
        limit_bytes: int,
        write_bytes_per_s: float,
        events: KvEventLog,
        totals: PlaceTotals,
    ) -> None:
        """Lock a folder below `root`. Raises ValueError if not a single block fits, OSError."""
        super().__init__(BlockPlace.DISK, block_bytes, limit_bytes, events, totals, Bandwidth(ASSUMED_BYTES_PER_S))
        self._identity, self._write_bytes_per_s = layout_identity(layout), write_bytes_per_s
        family = root / f"{_FAMILY}{self._identity.hex()[:32]}"
        family.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.folder, self._lock = _lock_folder(family)
        self._root = root
        self._writer = ThreadPoolExecutor(1, "kv-disk-write")  # deletes as well: in the order of the books
        self._readers = ThreadPoolExecutor(2, "kv-disk-read")

    async def open(self) -> None:
        """Enter the blocks of an earlier process, and delete what is damaged, foreign, or too much."""
        loop = asyncio.get_running_loop()
        names, n_damaged = await loop.run_in_executor(self._writer, self._scan)
        self.totals.failures["corrupt"] += n_damaged
        self._remove(self.restore(names))
        log.info("%d KV blocks in %s (%d damaged files were deleted)", len(self), self.folder, n_damaged)

    def close(self) -> None:
        """Let go of the folder, after the writes and deletions in progress."""
        self._readers.shutdown(wait=False, cancel_futures=True)
        self._writer.shutdown(wait=True)
        os.close(self._lock)

    async def read(self, digests: Sequence[bytes]) -> Sequence[bytes | None]:
        """Contents of held blocks up to the first damaged file, which is counted and deleted."""
        loop = asyncio.get_running_loop()
        contents, error = await loop.run_in_executor(self._readers, self._read, digests)
        if error is None:
            return contents
        digest = digests[len(contents)]
        log.warning("KV block %s is computed again: %s", self._path(digest), error)
        self.totals.failures["corrupt" if isinstance(error, DamagedError) else "io"] += 1
        self.discard(digest)  # and the blocks that follow it
        return [*contents, None]

    async def write(self, names: Sequence[BlockName], contents: Sequence[bytes]) -> None:
        """Write files at the bounded rate. Raises OSError."""
        loop, began = asyncio.get_running_loop(), time.monotonic()
        await loop.run_in_executor(self._writer, self._write, names, contents)
        due_s = len(names) * self.block_bytes / self._write_bytes_per_s
        await asyncio.sleep(max(0.0, due_s - (time.monotonic() - began)))

    def _read(self, digests: Sequence[bytes]) -> tuple[list[bytes], DamagedError | OSError | None]:
        """Contents of the leading blocks, and why the next one cannot be read."""
        contents: list[bytes] = []
        for digest in digests:
            path = self._path(digest)
            try:
                content = read_block(path, self._identity, digest, self.block_bytes)
                os.utime(path)  # a restarted process takes it for the time of the last use
            except (DamagedError, OSError) as error:
                return contents, error
            contents.append(content)
        return contents, None

    def _write(self, names: Sequence[BlockName], contents: Sequence[bytes]) -> None:
        for name, content in zip(names, contents, strict=True):
            path = self._path(name.digest)
            try:
                write_block(path, self._identity, name, content)
            except FileNotFoundError:  # the first file of its folder
                path.parent.mkdir(mode=0o700, exist_ok=True)
                write_block(path, self._identity, name, content)

    def _remove(self, digests: Sequence[bytes]) -> None:
        self._writer.submit(self._unlink, [self._path(digest) for digest in digests])

    def _unlink(self, paths: Sequence[Path]) -> None:
        for path in paths:
            try:
                path.unlink(missing_ok=True)
            except OSError as error:  # the next start tries again
                log.warning("%s was not deleted: %s", path, error)

    def _path(self, digest: bytes) -> Path:
        text = digest.hex()
        return self.folder / text[:2] / text

    def _scan(self) -> tuple[list[BlockName], int]:
        """Names of the folder's blocks, the oldest first, and the number of damaged files, which are deleted."""
        _delete_forgotten(self._root)
        blocks: list[tuple[float, BlockName]] = []
        n_damaged = 0
        for path in self.folder.glob("??/*"):
            try:
                blocks.append((path.stat().st_mtime, read_name(path, self._identity)))
            except (DamagedError, OSError) as error:
                if path.name.endswith(TEMPORARY):  # the process was killed in the middle of a write
                    log.info("%s: an unfinished write", path)
                else:
                    n_damaged += 1
                    log.warning("%s is deleted: %s", path, error)
                self._unlink([path])
        blocks.sort(key=lambda each: each[0])
        return [name for _, name in blocks], n_damaged


def _lock_folder(family: Path) -> tuple[Path, int]:
    """The first folder that no other process has locked, and the lock. Raises OSError."""
    for n in range(_MOST_FOLDERS):
        folder = family / str(n)
        folder.mkdir(mode=0o700, exist_ok=True)
        if (lock := _try_lock(folder)) is not None:
            return folder, lock
    raise OSError(f"{family}: {_MOST_FOLDERS} folders are in use")


def _try_lock(folder: Path) -> int | None:
    descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def _delete_forgotten(root: Path) -> None:
    """Delete folders of any model that no process has used for a long time."""
    for folder in root.glob(f"{_FAMILY}*/[0-9]*"):
        try:
            used_at = max(path.stat().st_mtime for path in (folder, *folder.iterdir()))
            lock = _try_lock(folder) if time.time() - used_at >= _FORGOTTEN_S else None
        except OSError as error:  # another process deletes it, or it is no folder of ours
            log.info("%s is left alone: %s", folder, error)
            continue
        if lock is None:
            continue
        log.info("%s is deleted: it was not used for a week", folder)
        shutil.rmtree(folder, ignore_errors=True)  # another process may do the same
        os.close(lock)
