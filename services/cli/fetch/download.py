"""Downloads the files of a listing, and checks their sizes and hashes against the hub's."""

from __future__ import annotations

import glob
import hashlib
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import HfApi

from services.cli.errors import CommandError
from services.common.hub import Listing, RemoteFile

_AT_ONCE = 4
_READ_BYTES = 4 << 20
_CACHE = ".cache"  # huggingface_hub's records of its downloads
_GB = 1e9


class DamagedFileError(Exception):
    """A file does not match the hub's size or hash; it has been removed."""


def download(api: HfApi, model: str, listing: Listing, folder: Path) -> None:
    """Download missing files into the folder, and check all.

    Raises DamagedFileError, and the errors of huggingface_hub.
    """
    _require_space(listing, folder)
    for unfinished in folder.glob(f"{_CACHE}/**/*.incomplete"):
        unfinished.unlink()  # left by a killed process; huggingface_hub would not resume it
    api.snapshot_download(
        model,
        revision=listing.commit,
        local_dir=folder,
        cache_dir=folder / _CACHE / "hub",
        allow_patterns=[glob.escape(file.name) for file in listing.files],
        max_workers=_AT_ONCE,
    )
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        for _ in threads.map(lambda file: _check(folder, file), listing.files):
            pass
    shutil.rmtree(folder / _CACHE, ignore_errors=True)


@contextmanager
def progress(folder: Path, listing: Listing, say: Callable[[str], None], every_s: float) -> Iterator[None]:
    """Report at intervals how much has been downloaded, while the block runs."""
    done = threading.Event()

    def watch() -> None:
        before, then = size_of_folder(folder), time.monotonic()
        while not done.wait(every_s):
            there, now = size_of_folder(folder), time.monotonic()
            share = min(1.0, there / max(1, listing.size))
            rate = max(0, there - before) / (now - then) / 1e6
            say(f"{there / _GB:.1f} of {listing.size / _GB:.1f} GB ({share:.0%}), {rate:.0f} MB/s")
            before, then = there, now

    thread = threading.Thread(target=watch, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _require_space(listing: Listing, folder: Path) -> None:
    missing = listing.size - sum(_size_of(folder / file.name) for file in listing.files)
    free = shutil.disk_usage(folder).free
    if missing > free:
        raise CommandError(f"{folder.parent}: {missing / _GB:.1f} GB are needed and {free / _GB:.1f} GB are free")


def _check(folder: Path, file: RemoteFile) -> None:
    """Check a file against the hub's size and hash, and flush it to disk."""
    path = folder / file.name
    if not path.is_file():
        raise DamagedFileError(f"{file.name} did not come")
    if file.size and path.stat().st_size != file.size:
        size = path.stat().st_size
        path.unlink()
        raise DamagedFileError(f"{file.name} has {size:,} bytes, the hub says {file.size:,}")
    sha256, git = hashlib.sha256(), hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False)
    digest, expected = (sha256, file.sha256) if file.sha256 else (git, file.git_sha1)
    with path.open("rb") as stream:
        while expected and (chunk := stream.read(_READ_BYTES)):
            digest.update(chunk)
        os.fsync(stream.fileno())
    if expected and digest.hexdigest() != expected:
        path.unlink()
        raise DamagedFileError(f"{digest.name} of {file.name} is {digest.hexdigest()}, the hub says {expected}")


def size_of_folder(folder: Path) -> int:
    """Return the bytes of all files of a folder, which may come and go meanwhile."""
    return sum(_size_of(Path(parent, name)) for parent, _, names in os.walk(folder) for name in names)


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:  # the file was renamed meanwhile
        return 0
